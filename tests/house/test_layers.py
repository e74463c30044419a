"""Imports point down, packages have one owner, and the slot machine sees neither clock nor network."""

from __future__ import annotations

import ast
import sys
from pathlib import PurePosixPath

import pytest

from tests.house.source import ROOT, Source, imports, sources

# A part may import parts of a lower rank, and itself. Ranks below 10 are L0, the tens are the layers.
RANK = {
    "": 0,  # strata/__init__.py
    "errors": 0,
    "request": 0,
    "messages": 1,
    "config": 1,
    "console": 1,
    "metric_table": 1,
    "metrics": 2,
    "weights": 10,
    "text": 10,
    "devices": 10,
    "kernels": 11,
    "engine": 20,
    "slots": 30,
    "server": 40,
    "model": 49,
    "hardware": 49,
    "tracefile": 49,
    "app": 50,
    "server.__main__": 51,
}
L0 = 9

OWNERS = {
    "h11": "server",
    "orjson": "server",
    "uvloop": "app",
    "jinja2": "text",
    "tokenizers": "text",
    "threadpoolctl": "engine",
    "prometheus_client": "metrics",
    "cupy": "devices.cuda",
    "cupy_backends": "devices.cuda",
}

# What a pure decision cannot need. manager.py is the one file of slots that meets the world.
EFFECTS = {"asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "selectors", "socket", "subprocess", "threading", "time"}


def part_of(module: str) -> str:
    """The part of the house a module of strata belongs to."""
    inner = module.removeprefix("strata").removeprefix(".")
    return inner if inner == "server.__main__" else inner.partition(".")[0]


def offences(source: Source) -> list[str]:
    """Every import of ``source`` that the house does not allow."""
    part, found = part_of(source.module), []
    for module, line in imports(source):
        top = module.partition(".")[0]
        if top == "strata":
            reason = _against_layers(part, module)
        elif top in sys.stdlib_module_names:
            reason = "an effect" if part == "slots" and top in EFFECTS and not source.path.endswith("manager.py") else ""
        else:
            reason = _against_owners(part, source.module, top)
        if reason:
            found.append(f"{source.path}:{line}: imports {module}: {reason}")
    return found


def _against_layers(part: str, module: str) -> str:
    target = part_of(module)
    if target not in RANK:
        # `from strata import __version__` names no module.
        return "" if module.startswith("strata.__") else "a part without a rank"
    if target == part or (part == "server.__main__" and target == "server"):
        return ""
    if part == "slots" and RANK[target] > L0:
        return "slots sees L0 only"
    return "" if RANK[target] < RANK[part] else f"{part or 'strata'} lies below or beside {target}"


def _against_owners(part: str, module: str, top: str) -> str:
    if top == "numpy":
        return "" if RANK[part] > L0 and part != "slots" else "no numpy here"
    owner = OWNERS.get(top)
    if owner is None:
        return "a package without an owner"
    return "" if module == f"strata.{owner}" or module.startswith(f"strata.{owner}.") else f"strata.{owner} owns it"


@pytest.mark.parametrize("source", sources("strata"), ids=lambda source: source.path)
def test_imports(source: Source) -> None:
    assert part_of(source.module) in RANK, f"{source.path}: give the new part a rank"
    assert offences(source) == []


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("strata/weights/x.py", "import strata.engine", "lies below"),
        ("strata/text/x.py", "from strata.weights.gguf import GGUFFile", "lies below or beside"),
        ("strata/text/x.py", "from strata import weights", "lies below or beside"),
        ("strata/text/x.py", "from .. import weights", "lies below or beside"),
        ("strata/text/x.py", "if TYPE_CHECKING:\n    from strata.slots.machine import SlotMachine", "lies below"),
        ("strata/engine/x.py", "def f():\n    import strata.slots", "lies below"),
        ("strata/slots/machine.py", "from strata.engine import forward", "slots sees L0 only"),
        ("strata/slots/machine.py", "import time", "an effect"),
        ("strata/slots/machine.py", "import numpy as np", "no numpy"),
        ("strata/errors.py", "from strata.messages import Request", "lies below"),
        ("strata/config/x.py", "import numpy", "no numpy"),
        ("strata/engine/x.py", "import h11", "strata.server owns it"),
        ("strata/devices/base.py", "import cupy", "strata.devices.cuda owns it"),
        ("strata/server/x.py", "import requests", "without an owner"),
        ("strata/server/x.py", "from strata.app import Server", "lies below"),
        ("strata/engine/x.py", "import strata.wheels", "without a rank"),
    ],
)
def test_the_rules_bite(path: str, text: str, reason: str) -> None:
    found = offences(Source(path, text, ast.parse(text)))
    assert found and reason in found[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("strata/text/template.py", "import jinja2.sandbox\nfrom strata.errors import ModelError"),
        ("strata/slots/manager.py", "import asyncio"),
        ("strata/slots/machine.py", "from strata.slots.policy import pick_slot\nfrom strata.messages import Window"),
        ("strata/server/__main__.py", "from strata.app import Server\nfrom strata import __version__"),
        ("strata/app.py", "import uvloop\nfrom strata.server.listener import Listener"),
        ("strata/devices/cuda.py", "import cupy"),
    ],
)
def test_the_rules_let_the_house_be_built(path: str, text: str) -> None:
    assert offences(Source(path, text, ast.parse(text))) == []


def test_packages_are_listed_in_setup_cfg() -> None:
    import configparser

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = set(setup["options"]["packages"].split())
    folders = {PurePosixPath(source.path).parent.as_posix().replace("/", ".") for source in sources("strata")}
    assert listed == folders | {"strata.cuda_src"}
