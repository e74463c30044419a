"""``python -m strata.config`` prints docs/CONFIG.md."""

from __future__ import annotations

import sys

from strata.config.show import markdown

sys.stdout.write(markdown())
