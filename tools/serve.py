"""Serve a model from a fresh checkout: python3 tools/serve.py [--wheels DIR] [server flags ...]

Makes .venv, installs what the server needs, fetches SmolLM2-135M-Instruct unless a model is named, and becomes
`python -m strata.server` with every other flag passed on. Standard library only; later starts need no network.
"""

from __future__ import annotations

import argparse
import os
import sys

from _model import ensure_model, model_path
from _venv import ROOT, Problem, Venv, require_python, say


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wheels")
    own, flags = parser.parse_known_args(arguments)
    try:
        require_python()
        wanted = asked_for(flags)
        if wanted is None:
            return 0
        venv = Venv()
        venv.ensure(wheels=own.wheels)
        if wanted in ("", os.path.abspath(model_path(ROOT))):
            path = ensure_model(venv, own.wheels)
            flags = flags if wanted else ["--model", str(path), *flags]
        return venv.run(["-m", "strata.server", *flags])
    except Problem as problem:
        say(f"error: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130


def asked_for(flags: list[str]) -> str | None:
    """The model that flags, environment or config name; "" where none does, None where only help was asked for.

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
        print(f"{__doc__}\nThe server's flags:\n\n{help_text()}")
        return None
    return os.path.abspath(loaded.settings.model) if loaded.settings.model else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
