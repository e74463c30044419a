"""The lint's reading of machine code, and on one small kernel the whole way, where its tools are installed."""

import importlib.util
from pathlib import Path

import pytest

from strata.devices import nvrtc

ROOT = Path(__file__).parent.parent.parent
spec = importlib.util.spec_from_file_location("lint_kernels", ROOT / "tools" / "lint_kernels.py")
lint = importlib.util.module_from_spec(spec)


@pytest.fixture(autouse=True, scope="module")
def loaded():
    import sys

    sys.modules["lint_kernels"] = lint  # dataclasses look their module up
    spec.loader.exec_module(lint)
    yield
    del sys.modules["lint_kernels"]


LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E R2, [R4] ;
        /*0020*/                   IDP.4A.S8.S8 R3, R2, R5, R3 ;
        /*0030*/                   IDP.4A.S8.S8 R3, R2, R5, R3 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   NOP ;
        /*0060*/                   BRA `(.L_x_2) ;
"""


def test_instructions_are_counted_in_the_loop_with_the_products():
    assert lint.instructions_per_32(LOOP.splitlines()) == 8 * 4 / 2
    assert lint.instructions_per_32(["/*0000*/ EXIT ;"]) == 0


def test_a_stack_and_too_many_instructions_are_problems():
    facts = [lint.Facts("matvec<odd4, 1>", 40, 0, 0, 47.0), lint.Facts("add", 10, 8, 0, 0.0)]
    assert lint.broken_limits("sm_90", facts) == [
        "sm_90: add has 8 bytes of stack", "sm_90: matvec<odd4, 1> takes 47.0 instructions per 32 weights, at most 46",
    ]  # fmt: skip
    assert len(lint.broken_limits("sm_86", facts)) == 1


@pytest.mark.skipif(nvrtc.load_library() is None, reason="NVRTC is not installed (nvidia-cuda-nvrtc-cu12)")
def test_the_best_kernel_keeps_its_limit_on_a_gpu(tmp_path):
    if lint.find_tool("cuobjdump") is None or lint.find_tool("nvdisasm") is None:
        pytest.skip("cuobjdump or nvdisasm is not installed (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    modules = nvrtc.compile_modules({"matvec": ["matvec<odd4, 1>", "matvec<packed3, 1>"]}, "sm_90", tmp_path)
    facts = lint.inspect(modules["matvec"], count=True)
    assert [one.entry for one in facts] == ["matvec<odd4, 1>", "matvec<packed3, 1>"]
    assert all(one.registers > 0 and one.per_32 > 20 for one in facts)
    assert lint.broken_limits("sm_90", facts) == []
