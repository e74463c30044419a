"""Run the tests from a fresh checkout: python3 tools/test.py [--wheels DIR] [--no-model] [pytest arguments ...]

Makes .venv, installs the server's and the tests' packages, fetches the model that some tests run, and becomes
`python -m pytest` in the checkout. Standard library only; later runs need no network.
"""

from __future__ import annotations

import argparse
import os
import sys

from _model import ensure_model
from _venv import ROOT, Problem, Venv, require_python, say


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wheels")
    parser.add_argument("--no-model", action="store_true")
    own, rest = parser.parse_known_args(arguments)
    if "--help" in rest or "-h" in rest:
        print(__doc__)
        return 0
    try:
        require_python()
        venv = Venv()
        venv.ensure(extras=("test",), wheels=own.wheels)
        if not own.no_model:
            ensure_model(venv, own.wheels)
        os.chdir(ROOT)
        return venv.run(["-m", "pytest", *rest])
    except Problem as problem:
        say(f"error: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
