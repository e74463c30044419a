"""A server that cannot start: one line that says what to do, exit status 1, nothing left listening."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.app import check_only, run
from strata.config import Settings
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor, write_gguf
from tests.e2e.serving import TINY


@pytest.fixture(autouse=True)
def the_log_as_it_was() -> Iterator[None]:
    """``run`` sets up the log of a process of its own."""
    logger = logging.getLogger("strata")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def refused(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    """The line that ``run`` prints to stderr."""
    assert run(Settings(**{"model": TINY, "port": 0, **settings})) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


def test_a_name_with_a_line_break_leaves_the_message_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert r"no\x0asuch.gguf" in refused(capsys, model=Path("no\nsuch.gguf"))
    assert check_only(Settings(model=Path("no\nsuch.gguf"))) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_busy_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused(capsys, port=port)
    assert f"127.0.0.1:{port}" in line and "--port" in line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_an_address_that_strangers_reach_needs_a_key(capsys: pytest.CaptureFixture[str], host: str) -> None:
    line = refused(capsys, host=host)
    assert host in line and "--api-key-file" in line and "--allow-remote-without-key" in line


def test_key_files_without_a_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert "keys" in refused(capsys, api_key_file=path)
    path.write_text("# none yet\n\n")
    assert "keys" in refused(capsys, api_key_file=path)


def cut(path: Path) -> None:
    path.write_bytes(TINY.read_bytes()[:-100_000])


def without_a_tensor(path: Path) -> None:
    rewritten(path, {}, "blk.2.ffn_up.weight")


def of_an_unknown_family(path: Path) -> None:
    rewritten(path, {"general.architecture": "nosuch"})


def of_an_unknown_pre_tokenizer(path: Path) -> None:
    rewritten(path, {"tokenizer.ggml.pre": "nosuch"})


def with_a_broken_template(path: Path) -> None:
    rewritten(path, {"tokenizer.chat_template": "{% for %}"})


def rewritten(path: Path, metadata: dict[str, object], left_out: str = "") -> None:
    with GGUFFile.open(TINY) as file:
        tensors = {name: StoredTensor(one.type, one.shape, one.data) for name, one in file.tensors.items() if name != left_out}
        write_gguf(path, {**file.metadata, **metadata}, tensors)


@pytest.mark.parametrize("make", [
    lambda path: None, Path.mkdir, Path.touch, lambda path: path.write_text("This is no model. " * 99), cut,
    without_a_tensor, of_an_unknown_family, of_an_unknown_pre_tokenizer, with_a_broken_template,
], ids=["missing", "folder", "empty", "text", "cut", "tensor", "family", "pre", "template"])
def test_a_model_that_cannot_be_served(capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Any) -> None:
    """And ``--check`` says the same, but for what shows in the weights alone."""
    path = tmp_path / "model.gguf"
    make(path)
    line = refused(capsys, model=path)
    assert "model.gguf" in line
    assert check_only(Settings(model=path)) == 1
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("settings", [{"context": 4096, "kv_memory_mib": 1}, {"kv_memory_mib": 16777216}], ids=str)
def test_memory_that_is_not_there(capsys: pytest.CaptureFixture[str], settings: dict[str, Any]) -> None:
    assert "--context" in (line := refused(capsys, **settings)) or "kv_memory_mib" in line


def test_no_model_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model" in refused(capsys, model=None)
