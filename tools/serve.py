"""Serve a model from a fresh checkout: python3 tools/serve.py [--wheels DIR] [server flags ...]

Makes .venv, installs what the server needs, fetches SmolLM2-135M-Instruct unless a model is named (the head that
drafts for it, by its file's name, is in configs/heads), and becomes `python -m strata.server` with every other flag
passed on. Where an NVIDIA driver and GPU are found, and no device is named, it installs what they need too and serves
on them (--device cpu keeps to the processors). Standard library only; later starts need no network.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from _gpu import find_extra
from _model import ensure_model, model_path
from _venv import ROOT, Problem, Venv, require_python, say, take_wheels


HEAD = ROOT / "configs" / "heads" / "smollm2-135m-mtp.gguf"


def main(arguments: list[str]) -> int:
    try:
        require_python()
        wheels, flags = take_wheels(arguments)
        loaded = asked_for(flags)
        if loaded is None:
            return 0
        check_files(loaded)
        venv = Venv()
        extras, flags = choose_device(loaded, flags)
        flags = install(venv, extras, wheels, loaded, flags)
        model = os.path.abspath(loaded.settings.model) if loaded.settings.model else ""
        if model in ("", os.path.abspath(model_path(ROOT))):
            path = ensure_model(venv, wheels)
            flags = flags if model else ["--model", str(path), *flags]
        if os.path.basename(model) in ("", model_path(ROOT).name) and loaded.origins["mtp"] == "default":
            flags = ["--mtp", str(HEAD), *flags]
        return venv.run(["-m", "strata.server", *flags])
    except Problem as problem:
        say(f"error: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130


def asked_for(flags: list[str]) -> Any:
    """The settings (strata.config.Loaded) that flags, environment and config make; None where only help was asked for.

    The settings table itself answers: it needs nothing but the standard library, and a mistyped flag is told before
    anything is fetched.
    """
    sys.path.insert(0, str(ROOT))
    from strata.config import help_text, load
    from strata.errors import SettingError

    try:
        loaded = load([*flags, "--print-config"], os.environ)
    except SettingError as error:
        raise Problem(str(error)) from None
    if loaded.mode == "help":
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word, as any tool
        print(f"{__doc__}\nThe server's flags:\n\n{help_text()}")
        return None
    return loaded


def check_files(loaded: Any) -> None:
    """Raises Problem for a file that is named and not there: nobody should wait for packages to be told so."""
    for name in ("model", "mtp", "api_key_file"):
        path = getattr(loaded.settings, name)
        fetched = os.path.abspath(model_path(ROOT))  # fetched where it is missing
        if path is not None and os.path.abspath(path) != fetched and not os.path.isfile(path):
            raise Problem(f"{loaded.origins[name]}: there is no file {path}; put it there, or name another with --{name.replace('_', '-')}")


def choose_device(loaded: Any, flags: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """The extras to install, and the flags: with GPUs added where there are some and nothing says otherwise. Says what was found.

    Raises Problem where GPUs were asked for and there are none.
    """
    settings = loaded.settings
    if not is_asked(loaded):
        extra, found = find_extra() if settings.kv != "f32" else (None, "")
        if extra:
            say(f"{found}, --device cuda (--device cpu keeps to the processors)")
            return (extra,), ["--device", "cuda", *flags]
        return (), flags
    if settings.device != "cuda":
        return (), flags
    extra, found = find_extra()
    if extra is None:
        raise Problem(f"--device cuda: {found}; use --device cpu")
    say(found)
    return (extra,), flags


def is_asked(loaded: Any) -> bool:
    """Whether a device was named, anywhere."""
    return any(loaded.origins[name] != "default" for name in ("device", "devices"))


def install(venv: Venv, extras: tuple[str, ...], wheels: str | None, loaded: Any, flags: list[str]) -> list[str]:
    """Install what is wanted; the flags to serve with. Packages for GPUs that nobody asked for are no reason not to serve."""
    try:
        venv.ensure(extras=extras, wheels=wheels)
        return flags
    except Problem as problem:
        if not extras or is_asked(loaded):
            raise
        say(f"no packages for the GPU ({problem}); going on with the processors")
    venv.ensure(wheels=wheels)
    return flags[2:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
