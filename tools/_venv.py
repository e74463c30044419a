"""The project's own virtual environment: made, filled and left alone while it is up to date. Standard library only.

``.venv`` gets the packages that setup.cfg lists, and a path file that points at the checkout: no build step, nothing to
install again after an edit or a pull, and nothing but wheels needed offline. What was installed is noted in a stamp; while
the stamp covers what is wanted, no network and no pip is touched. A working ``.venv`` that somebody else made is added to, never
cleared.
"""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)


class Problem(Exception):
    """Something the person at the terminal has to act on; the text is one line that says how."""


def say(text: str) -> None:
    print(f"strata: {text}", file=sys.stderr, flush=True)


def take_wheels(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The folder of --wheels, and the other arguments. Raises Problem without a folder's name, or where there is none."""
    wheels, rest, words = None, [], list(arguments)
    while words:
        word = words.pop(0)
        if word == "--wheels" and (not words or words[0].startswith("-")):
            raise Problem("--wheels needs a value: the folder with the wheels")
        if word == "--wheels":
            wheels = words.pop(0)
        elif word.startswith("--wheels="):
            wheels = word.partition("=")[2]
        else:
            rest.append(word)
    if wheels is not None and not os.path.isdir(wheels):
        raise Problem(f"--wheels {wheels}: there is no such folder")
    return wheels, rest


def require_python() -> None:
    if sys.version_info < OLDEST:
        found = ".".join(str(part) for part in sys.version_info[:3])
        raise Problem(f"Python {found} is too old; run this with Python 3.10 or newer")


class Venv:
    """The environment of the checkout ``root``."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.folder = root / ".venv"
        windows = os.name == "nt"
        self.python = self.folder / ("Scripts" if windows else "bin") / ("python.exe" if windows else "python")
        self.stamp = self.folder / "strata-installed.txt"
        # The interpreter and the place are part of the stamp: another Python or a moved checkout starts afresh.
        self.identity = f"Python {sys.version_info[0]}.{sys.version_info[1]} in {root}"

    def ensure(self, extras: tuple[str, ...] = (), wheels: str | None = None) -> None:
        """Make it hold everything setup.cfg wants, plus ``extras``; from the folder ``wheels`` alone, if given."""
        wanted = requirements(self.root, extras)
        identity, installed = self._stamped()
        if identity == self.identity and wanted <= installed and self._answers("pass"):
            return
        try:
            if self._prepare(identity):
                installed = set()
            say(f"installing {len(wanted - installed)} packages and what they need")
            self.pip(["install", *sorted(wanted)], wheels)
            self._link()
            self.stamp.write_text("\n".join([self.identity, *sorted(wanted | installed)]) + "\n", encoding="utf-8")
        except OSError as error:
            raise Problem(f"cannot write {self.folder}: {error.strerror}; put the checkout where you may write") from None

    def pip(self, arguments: list[str], wheels: str | None) -> None:
        """Run pip quietly; its failure becomes one line, its whole story is in .venv/pip.log."""
        source = ["--no-index", "--find-links", os.path.abspath(wheels)] if wheels else ["--retries", "2"]
        log = self.folder / "pip.log"
        log.unlink(missing_ok=True)
        options = ["--quiet", "--disable-pip-version-check", "--no-input", "--log", str(log)]
        command = [str(self.python), "-m", "pip", arguments[0], *options, *source, *arguments[1:]]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise Problem(f"{why_pip_failed(done.stderr + done.stdout, wheels)} (details: {log})")

    def run(self, arguments: list[str]) -> int:
        """Become ``python ARGUMENTS``: the same process, so that signals and the exit status are its own.

        Windows cannot replace a process: there the child gets Ctrl-C from the console itself and this one waits for it.
        """
        command = [str(self.python), *arguments]
        sys.stdout.flush()
        sys.stderr.flush()
        if os.name != "nt":
            os.execv(command[0], command)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return subprocess.call(command)

    def _stamped(self) -> tuple[str, set[str]]:
        try:
            identity, *lines = self.stamp.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return "", set()
        return identity, set(lines)

    def _prepare(self, stamped: str) -> bool:
        """Make sure that there is an environment with pip; True where nothing installed before can be relied on."""
        runs = self._answers("pass")
        if runs and not stamped and not self._answers(f"import sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"):
            raise Problem(f"{self.folder} is somebody's environment of another Python than this one; move it away, or use its Python")
        if not runs or stamped not in ("", self.identity):
            self._make(clear=self.folder.exists())
            return True
        if not self._answers("import pip"):
            self._make(clear=False)
        return False

    def _answers(self, code: str) -> bool:
        """Whether the environment's Python is there and runs ``code`` without an error."""
        return self.python.exists() and subprocess.run([str(self.python), "-c", code], capture_output=True).returncode == 0

    def _make(self, clear: bool) -> None:
        say(f"making .venv ({self.identity.partition(' in ')[0]})")
        options = ["--clear"] if clear else []
        command = [sys.executable, "-m", "venv", *options, str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise Problem(why_venv_failed(done.stderr + done.stdout, self.folder))

    def _link(self) -> None:
        """Make ``import strata`` find the checkout from every folder."""
        ask = [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        folder = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        Path(folder, "strata-checkout.pth").write_text(f"{self.root}\n", encoding="utf-8")


def requirements(root: Path, extras: tuple[str, ...]) -> set[str]:
    """The requirement lines of setup.cfg: the package's own and those of ``extras``."""
    setup = configparser.ConfigParser()
    if not setup.read(root / "setup.cfg", encoding="utf-8"):
        raise Problem(f"{root / 'setup.cfg'} is missing; run this from a complete checkout")
    texts = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    return {line.strip() for text in texts for line in text.splitlines() if line.strip()}


def why_venv_failed(output: str, folder: Path) -> str:
    if "ensurepip" in output or "No module named venv" in output:
        return "this Python cannot make virtual environments; on Debian and Ubuntu: sudo apt install python3-venv"
    return f"cannot make {folder}: {last_line(output)}; remove it, or put the checkout where you may write"


def why_pip_failed(output: str, wheels: str | None) -> str:
    """One line out of pip's many."""
    for line in output.splitlines():
        _, found, name = line.partition("No matching distribution found for ")
        if found and wheels:
            return f"{wheels} holds no fitting wheel for {name}; add it, or leave --wheels out where there is a network"
        if found:
            return f"pip cannot find {name}: is there a network? Without one: --wheels DIR, a folder with the wheels"
    return f"pip failed: {last_line(output)}"


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no message"])[-1]
