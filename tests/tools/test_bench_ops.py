"""tools/bench_ops.py on a tiny model: one row and eight are measured beside the products that they need."""

from __future__ import annotations

import json
import sys

import pytest

from tests.engine.running import MOE
from tools.bench_ops import main


def test_windows_are_measured_beside_bare_products(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with a dense block, experts, and one that all rows share."""
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", str(MOE[1]), "--threads", "2", "--rounds", "1"])
    main()
    *table, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert [row.split()[0] for row in table] == list(found) and found["threads"] == 2
    for rows in (1, 8):
        assert found[f"ratio_{rows}"] == pytest.approx(found[f"decode_{rows}_ms"] / found[f"bare_{rows}_ms"], rel=1e-2)
    assert all(found[name] > 0 for name in ("prompt_tokens_s", "gemm_gflops", "gemm_8_ms", "ratio_1_least", "ratio_8_least"))
