"""Train an MTP head on text the model writes itself: python tools/train_mtp COMMAND --help. Needs torch (see docs/MTP_HEAD.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.train_mtp.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
