"""The run configs that come with the project load, say what their names promise, and fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.config import Settings, load
from strata.engine.split import asked_split

CONFIGS = Path(__file__).parent.parent.parent / "configs"
EXAMPLES = sorted(CONFIGS.glob("*.json"))


def settings_of(name: str, *argv: str, **environ: str) -> Settings:
    return load(["--config", str(CONFIGS / name), *argv], environ).settings


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads_and_every_key_of_it_counts(path: Path) -> None:
    loaded = load(["--config", str(path)], {})
    assert loaded.mode == "serve" and loaded.settings.slot_expire_s == 600
    content = json.loads(path.read_text(encoding="utf-8"))
    keys = len(content) - len({"args", "env", "sampling"} & content.keys())
    given = keys + len(content.get("args", [])) // 2 + len(content["env"]) + len(content["sampling"])
    assert sum(origin != "default" for origin in loaded.origins.values()) == given + 1, "and the config itself"
    assert settings_of(path.name, STRATA_SLOT_EXPIRE_S="7").slot_expire_s == 7


def test_every_example_is_in_the_readme() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) == 3 and all(f"`{path.name}`" in text for path in EXAMPLES)


def test_on_the_processors() -> None:
    settings = settings_of("strata-smollm2.json")
    assert (settings.device, settings.batch, settings.spec) == ("cpu", 8, 16)
    assert settings.mtp is not None and settings.mtp.read_bytes()[:4] == b"GGUF", "the head comes with the project"
    assert settings.model == CONFIGS / ".." / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_on_one_gpu() -> None:
    settings = settings_of("strata-smollm2-gpu.json")
    assert (settings.device, settings.devices, settings.kv, settings.context) == ("cuda", ("0",), "int8", 8192)


def test_on_four_gpus() -> None:
    settings = settings_of("strata-qwen3-30b-4gpu.json")
    assert settings.layer_split == (12, 24, 36)
    assert (settings.batch, settings.batch_groups, settings.context, settings.kv, settings.spec) == (8, 4, 262_144, "int8", 4)
    assert asked_split(settings.layer_split, 48, len(settings.devices)) == [range(start, start + 12) for start in (0, 12, 24, 36)]
    assert settings.api_key_file == CONFIGS / "strata.keys"
    assert settings_of("strata-qwen3-30b-4gpu.json", "--gpu", "3,2,1,0").devices == ("3", "2", "1", "0")
