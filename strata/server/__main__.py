"""``python -m strata.server``: read the settings, then run the app, or print what was asked for."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # The imports take a second. Ctrl-C meanwhile ends the process as it ends any other, not with a traceback out of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from strata import __version__  # noqa: E402
from strata.config import help_text, load, printed  # noqa: E402
from strata.console import escape  # noqa: E402
from strata.errors import StartError  # noqa: E402


def main() -> int:
    """Exit status: 0 after a clean end, 1 when the server could not start, 2 for a wrong setting."""
    try:
        loaded = load(sys.argv[1:], os.environ)
    except StartError as error:
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return 2
    if sys.stderr is not None:
        # A model file that is cut short or overwritten while it is mapped ends the process by a signal: let the log say where.
        faulthandler.enable()
    if loaded.mode != "serve" and hasattr(signal, "SIGPIPE"):
        # What only prints ends like any program when its reader does (--help | head), not with a traceback.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if loaded.mode == "help":
        print(help_text())
    elif loaded.mode == "version":
        print(f"strata {__version__}")
    elif loaded.mode == "print_config":
        print(printed(loaded))
    else:
        # Only now: numpy and the rest take time, and --help needs none of them.
        from strata.app import check_only, run

        return check_only(loaded.settings) if loaded.mode == "check" else run(loaded.settings)
    return 0


sys.exit(main())
