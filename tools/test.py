"""Run the tests from a fresh checkout: python3 tools/test.py [--wheels DIR] [--no-model] [pytest arguments ...]

Makes .venv, installs the server's and the tests' packages, fetches the model that some tests run, and becomes
`python -m pytest` in the checkout. Standard library only; later runs need no network.
"""

from __future__ import annotations

import os
import sys

from _model import ensure_model
from _venv import ROOT, Problem, Venv, require_python, say, take_wheels


def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    try:
        require_python()
        wheels, rest = take_wheels(arguments)
        venv = Venv()
        venv.ensure(extras=("test",), wheels=wheels)
        if "--no-model" in rest:
            rest.remove("--no-model")
        else:
            ensure_model(venv, wheels)
        os.chdir(ROOT)
        return venv.run(["-m", "pytest", *rest])
    except Problem as problem:
        say(f"error: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
