"""The settings of a layer split as people write them: flags, JSON, Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.config import Settings, load
from strata.errors import SettingError


def from_file(folder: Path, **content: Any) -> Settings:
    path = folder / "run.json"
    path.write_text(json.dumps({"model": "m.gguf", **content}), encoding="utf-8")
    return load(["--config", str(path)], {}).settings


def test_devices_keep_their_order_and_may_come_again(tmp_path: Path) -> None:
    assert load(["--model", "m", "--devices", "2, 0,2"], {}).settings.devices == ("2", "0", "2")
    assert load(["--model", "m", "--devices=cpu,cpu"], {}).settings.devices == ("cpu", "cpu")
    assert from_file(tmp_path, devices=[2, 0, "2"]).devices == ("2", "0", "2")
    assert from_file(tmp_path, devices=1).devices == ("1",)
    assert from_file(tmp_path).devices == ()


def test_a_layer_split_is_numbers_or_auto(tmp_path: Path) -> None:
    assert load(["--model", "m", "--layer-split", "12,24, 36"], {}).settings.layer_split == (12, 24, 36)
    assert load(["--model", "m", "--layer-split", "auto"], {}).settings.layer_split is None
    assert from_file(tmp_path, layer_split=[12, 24]).layer_split == (12, 24)
    assert from_file(tmp_path, layer_split="12,24").layer_split == (12, 24)
    assert from_file(tmp_path, layer_split=12).layer_split == (12,)
    assert Settings(layer_split=(1,)).layer_split == (1,)


@pytest.mark.parametrize("flag, text", [
    ("--layer-split", "12,"), ("--layer-split", "a"), ("--layer-split", "-1"), ("--devices", "0,,1"), ("--devices", ""),
])
def test_what_is_no_list_is_refused(flag: str, text: str) -> None:
    with pytest.raises(SettingError, match=flag):
        load(["--model", "m", flag, text], {})


@pytest.mark.parametrize("content", [
    {"layer_split": []}, {"layer_split": [True]}, {"layer_split": [1.5]}, {"devices": [True]}, {"devices": [[0]]},
])
def test_json_of_another_type_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        from_file(tmp_path, **content)
