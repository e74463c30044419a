"""What is refused, in which words; the config file's small print; what must hold before the server starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.config import TABLE, Settings, check, help_text, load, printed
from strata.config.peers import OURS
from strata.config.table import flag_of
from strata.errors import SettingError


def message(*argv: str, **environ: str) -> str:
    with pytest.raises(SettingError) as caught:
        load([*argv, "--print-config"], environ)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "run.json"


def in_file(path: Path, content: object) -> str:
    """The error that a config file with this content gives."""
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return message("--config", str(path))


def from_file(path: Path, content: object) -> Settings:
    path.write_text(json.dumps(content), encoding="utf-8")
    return load(["--config", str(path), "--print-config"], {}).settings


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bacth", "3"], ["--bacth", "did you mean --batch?"]),
        (["--max_body_mib=3"], ["did you mean --max-body-mib?"]),
        (["--qqq"], ["unknown", "see --help"]),
        (["--ctx-size", "4096"], ["--ctx-size: unknown; did you mean --context?"]),
        (["--batch-size=64"], ["did you mean --chunk?"]),
        (["-ngl", "99"], ["-ngl: unknown; did you mean --device?"]),
        (["3"], ["3", "--name value"]),
        (["--batch", "300"], ["--batch", "300", "whole number from 1 to 256 (slots)"]),
        (["--batch=0"], ["--batch", "from 1 to 256"]),
        (["--batch", "2.5"], ["2.5", "whole number"]),
        (["--batch", "1_0"], ["1_0", "whole number"]),
        (["--batch"], ["--batch", "needs a value"]),
        (["--batch", "--port", "1"], ["--batch", "needs a value"]),
        (["--top-p", "0"], ["--top-p", "above 0, up to 1"]),
        (["--temperature", "nan"], ["--temperature", "nan"]),
        (["--temperature", "warm"], ["--temperature", "warm"]),
        (["--kv", "f64"], ["--kv", "f64", "f32, f16 or int8"]),
        (["--deterministic=maybe"], ["--deterministic", "maybe", "on or off"]),
        (["--device", "gpu"], ["--device", "gpu", "must be cpu, cuda or emulated"]),
        (["--api-key", "hush"], ["STRATA_API_KEY", "--api-key-file"]),
        (["--context", "soon"], ["--context", "soon", "or auto"]),
        (["--model", ""], ["--model", "a path"]),
    ],
)
def test_a_wrong_command_line_is_named(argv: list[str], words: list[str]) -> None:
    text = message(*argv)
    assert all(word in text for word in words), text
    assert "hush" not in text


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"STRATA_BATHC": "3"}, ["STRATA_BATHC in the environment", "did you mean STRATA_BATCH?"]),
        ({"STRATA_MAX_MODEL_LEN": "3"}, ["did you mean STRATA_CONTEXT?"]),
        ({"STRATA_SLOT_EXPIRE": "3"}, ["did you mean STRATA_SLOT_EXPIRE_S?"]),
        ({"STRATA_SLOT_EXPIRE_S": "long"}, ["STRATA_SLOT_EXPIRE_S in the environment", "'long'", "0 to 31536000 (seconds)"]),
        ({"STRATA_BATCH": "3", "STRATA_PARALLEL": "4"}, ["STRATA_PARALLEL", "contradicts STRATA_BATCH"]),
    ],
)
def test_a_wrong_environment_is_named(environ: dict[str, str], words: list[str]) -> None:
    text = message(**environ)
    assert all(word in text for word in words), text


def test_other_programs_variables_and_the_tests_own_are_none_of_our_business() -> None:
    environ = {"PATH": "x", "MY_STRATA_BATCH": "3", "STRATA_TEST_MODEL": "x", "STRATA_QUEUE_SIZE": "5"}
    assert load(["--print-config"], environ).settings == Settings(queue_size=5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"max_slotz": 2}, ["max_slotz in", "run.json", "unknown"]),
        ({"batsh": 2}, ["did you mean batch?"]),
        ({"batch-decode-share": 0.2}, ["did you mean batch_decode_share?"]),
        ({"smapling": {}}, ["did you mean sampling?"]),
        ({"max_num_seqs": 2}, ["did you mean batch?"]),
        ({"sampling": {"temp": 1}}, ["sampling.temp in", "did you mean temperature?"]),
        ({"sampling": {"temprature": 1}}, ["sampling.temprature in", "did you mean temperature?"]),
        ({"temperature": 1}, ["temperature in", "'sampling' object"]),
        ({"batch": "8"}, ["batch in", "'8'", "whole number from 1 to 256"]),
        ({"batch": True}, ["batch in", "True"]),
        ({"batch": 8.0}, ["batch in", "8.0"]),
        ({"batch": 8, "parallel": 7}, ["parallel in", "contradicts batch in"]),
        ({"batch": 8, "args": ["--batch", "7"]}, ["--batch (args in", "contradicts batch in"]),
        ({"args": "--batch 7"}, ["args in", "list of strings"]),
        ({"args": ["--bacth", "7"]}, ["--bacth (args in", "did you mean --batch?"]),
        ({"args": ["--check"]}, ["--check (args in", "only on the command line"]),
        ({"args": ["--config", "x"]}, ["--config (args in", "only on the command line"]),
        ({"config": "x"}, ["config in", "unknown"]),
        ({"env": {"STRATA_CONFIG": "x"}}, ["STRATA_CONFIG in the env block of", "only in the environment"]),
        ({"env": {"STRATA_BATHC": "3"}}, ["STRATA_BATHC in the env block of", "did you mean STRATA_BATCH?"]),
        ({"env": {"STRATA_BATCH": "x"}}, ["STRATA_BATCH in the env block of", "'x'", "1 to 256"]),
        ({"env": {"STRATA_BATCH": ["3"]}}, ["STRATA_BATCH in the env block of", "must be a string"]),
        ({"env": {"OMP_NUM_THREADS": "1"}}, ["OMP_NUM_THREADS", "only STRATA_* names"]),
        ({"env": ["x"]}, ["env in", "must be an object"]),
        ({"sampling": 1}, ["sampling in", "must be an object"]),
        ([1], ["run.json", "must be an object"]),
        ("{", ["run.json", "not valid JSON", "line 1"]),
        ('{"batch": 1, "batch": 2}', ["'batch' stands there twice"]),
        ('{"slot_expire_s": NaN}', ["NaN is not a JSON number"]),
        ('{"slot_expire_s": 1e999}', ["slot_expire_s in"]),
        ("[" * 100_000, ["not valid JSON"]),
    ],
)
def test_a_wrong_config_is_named(config: Path, content: object, words: list[str]) -> None:
    text = in_file(config, content)
    assert all(word in text for word in words), text


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    assert "no.json: cannot read the config file" in message("--config", str(tmp_path / "no.json"))
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"model": "caf\xe9"}')
    assert "not valid JSON" in message("--config", str(latin))


def test_a_byte_order_mark_and_null_are_tolerated(config: Path) -> None:
    config.write_bytes(b"\xef\xbb\xbf" + b'{"batch": 3, "host": null, "args": null, "env": {"STRATA_PORT": null, "STRATA_KV": "int8"}}')
    settings = load(["--config", str(config), "--print-config"], {}).settings
    assert (settings.batch, settings.host, settings.port, settings.kv) == (3, "127.0.0.1", 8080, "int8")


def test_the_env_block_works_like_the_exported_variable(config: Path) -> None:
    settings = from_file(config, {"env": {"STRATA_SLOT_EXPIRE_S": "600", "STRATA_SLOT_LOW_FIRST": False, "STRATA_BATCH": 4}})
    exported = {"STRATA_SLOT_EXPIRE_S": "600", "STRATA_SLOT_LOW_FIRST": "0", "STRATA_BATCH": "4"}
    assert settings == Settings(**{**vars(load(["--print-config"], exported).settings), "config": config})


def test_args_are_folded_in(config: Path) -> None:
    settings = from_file(config, {"parallel": 4, "args": ["--batch", "4", "--deterministic", "--kv=int8"]})
    assert (settings.batch, settings.deterministic, settings.kv) == (4, True, "int8")


def test_paths_in_a_config_count_from_its_folder(config: Path, tmp_path: Path) -> None:
    settings = from_file(config, {"model": "m.gguf", "env": {"STRATA_API_KEY_FILE": "sub/keys"}})
    assert (settings.model, settings.api_key_file) == (tmp_path / "m.gguf", tmp_path / "sub" / "keys")
    absolute = from_file(config, {"model": str(tmp_path / "other" / "m.gguf")})
    assert absolute.model == tmp_path / "other" / "m.gguf"
    assert load(["--model", "m.gguf"], {}).settings.model == Path("m.gguf")


def test_the_last_flag_counts_and_switches_stand_alone() -> None:
    settings = load(["--batch", "2", "--parallel", "3", "--deterministic", "--slot-low-first", "off", "--model", "x"], {}).settings
    assert (settings.batch, settings.deterministic, settings.slot_low_first) == (3, True, False)


@pytest.mark.parametrize(
    ("argv", "mode"),
    [
        (["--model", "x"], "serve"), (["--check", "--model", "x"], "check"), (["--print-config"], "print_config"), (["--help"], "help"),
        (["--batch", "no", "-h"], "help"), (["--version", "--nonsense"], "version"), (["--print-config", "--check"], "print_config"),
    ],
)
def test_modes(argv: list[str], mode: str) -> None:
    assert load(argv, {}).mode == mode


def test_secrets_are_masked(config: Path) -> None:
    loaded = load(["--print-config"], {"STRATA_API_KEY": "hush"})
    assert loaded.settings.api_key == "hush"
    assert "hush" not in printed(loaded) and "***" in printed(loaded) and "STRATA_API_KEY in the environment" in printed(loaded)
    for text in (in_file(config, {"api_key": ["hush"]}), message(STRATA_API_KEY="hush\x07")):
        assert "hush" not in text and "api_key" in text.lower()
    with pytest.raises(SettingError) as caught:
        Settings(api_key="hush\0")
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(loaded.settings)


def test_settings_are_checked_at_birth_and_never_change() -> None:
    with pytest.raises(SettingError, match=r"Settings\(batch=300\): must be a whole number from 1 to 256"):
        Settings(batch=300)
    settings = Settings(model="x.gguf")  # type: ignore[arg-type]
    assert settings.model == Path("x.gguf")
    with pytest.raises(AttributeError):
        settings.batch = 3  # type: ignore[misc]


def test_a_server_needs_a_model() -> None:
    with pytest.raises(SettingError, match="no model: name a GGUF file with --model FILE"):
        load([], {})
    with pytest.raises(SettingError, match="no model"):
        check(Settings())
    check(Settings(model=Path("x.gguf")))


def test_groups_must_divide_the_slots_before_anything_is_loaded() -> None:
    with pytest.raises(SettingError, match="batch_groups: 3 groups do not divide the 8 slots"):
        check(Settings(model=Path("x.gguf"), batch=8, batch_groups=3))
    check(Settings(model=Path("x.gguf"), batch=9, batch_groups=3))


def test_the_home_of_nobody_is_a_path_like_any_other() -> None:
    assert Settings(model="~nobody-of-this-name/x.gguf").model == Path("~nobody-of-this-name/x.gguf")  # type: ignore[arg-type]


def test_help_names_every_flag_with_its_default() -> None:
    text = help_text()
    for row in TABLE:
        assert (f"  {row.flag} " if row.flag else row.env) in text
        assert row.meaning.split()[0] in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_names_of_other_servers_lead_to_settings_of_this_one() -> None:
    taken = {name for row in TABLE for name in row.names}
    for peer, ours in OURS.items():
        assert peer not in taken, f"{peer} is a setting here, so nobody is ever told of {ours}"
        assert f"did you mean {flag_of(ours)}?" in message(f"-{peer}" if len(peer) < 4 else flag_of(peer), "1")
