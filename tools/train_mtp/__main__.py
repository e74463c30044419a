"""Train an MTP head on text the model writes itself: python tools/train_mtp COMMAND --help. Needs torch (see docs/MTP_HEAD.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    from tools.train_mtp.cli import main  # noqa: E402
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit("error: torch is missing: python -m pip install 'torch>=2.9' (docs/MTP_HEAD.md)")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
