"""Compiles every kernel for every architecture without a GPU and writes what came out to docs/KERNELS.md.

    python tools/lint_kernels.py [--arch sm_86 ...] [--check] [--cache FOLDER]

For each kernel instance: registers, shared memory, stack (any stack in a kernel is a spill, because no kernel calls a function),
and for matrix-vector products the instructions of the hot loop per 32 weights and row, counted in the machine code. Needs NVRTC, cuobjdump
and nvdisasm (PyPI: nvidia-cuda-nvrtc-cu12, nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm). Exits with 1 where a limit is broken. --check
writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from strata.devices import nvrtc  # noqa: E402
from strata.devices.source import default_cache  # noqa: E402
from strata.weights.layouts import LAYOUTS  # noqa: E402

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HEADS = (64, 96, 128, 256)
# Layouts of attn_q with attn_k, and of attn_v, as common mixes have them: IQ3_S and IQ3_M twice, Q4_K_M, Q5_K_M, IQ4_XS.
MIXED = (("packed3", "super4"), ("odd4", "super4"), ("super4", "super8"), ("affine_super8", "super8"), ("super8", "affine_super8"))
LIMITS = {"matvec<packed3, 1>": 130.0, "matvec<odd4, 1>": 46.0, "matvec<super4, 1>": 46.0, "matvec<flat4, 1>": 46.0}
LIMITS_ARCH = "sm_90"
DOCUMENT = ROOT / "docs" / "KERNELS.md"


@dataclass(frozen=True)
class Facts:
    """One kernel instance on one architecture. ``per_32``: instructions per 32 weights and row, 0 where not counted."""

    entry: str
    registers: int
    stack: int
    shared: int
    per_32: float


def instances() -> dict[str, list[str]]:
    """stem -> every instance that a model of one layout can need, and those of common mixes."""
    integer = [name for name in LAYOUTS if name != "half"]
    few = [f"matvec{end}<{layout}, {columns}>" for end in ("", "_swiglu") for layout in integer for columns in (1, 2, 4, 8)]
    many = [f"matmul{end}<{layout}, {tiles}>" for end in ("", "_swiglu") for layout in LAYOUTS for tiles in (1, 2, 3, 4)]
    few += [f"matvec_parts<{q}, {v}, none, {columns}>" for q, v in MIXED for columns in (1, 2, 4, 8)]
    few += [f"matvec_swiglu_parts<{q}, {v}, {columns}>" for q, v in MIXED[:1] for columns in (1, 2, 4, 8)]
    many += [f"matmul_parts<{q}, {v}, none, {tiles}>" for q, v in MIXED for tiles in (1, 2, 3, 4)]
    many += [f"matmul_swiglu_parts<{q}, {v}, {tiles}>" for q, v in MIXED[:1] for tiles in (1, 2, 3, 4)]
    kinds = ("", ", true")  # of pages: int8, fp16
    experts = [entry for layout in integer for lanes in (16, 32) for entry in (
        f"expert_swiglu<{layout}, {layout}, {lanes}>", f"expert_down<{layout}, {lanes}>",
    )]  # fmt: skip
    experts += [entry for layout in LAYOUTS for tiles in (1, 2, 3, 4) for entry in (
        f"grouped_swiglu<{layout}, {layout}, {tiles}>", f"grouped_down<{layout}, {tiles}>",
    )]  # fmt: skip
    return {
        "matvec": few,
        "matmul": many,
        "attention": [f"attention<{dim}, {tiles}{end}>" for end in kinds for dim in HEADS for tiles in (1, 2)],
        "store_heads": [f"store_heads<{dim}{end}>" for end in kinds for dim in HEADS],
        "rms_norm": ["rms_norm<false>", "rms_norm<true>", "rms_norm<true, true>"],
        "route": ["route<1>", "route<8>", "group_visits"],
        "experts": [*experts, "fold_visits"],
        "draft": ["join_norms", "move_rows", "clear"],
        "embed": [f"embed<{layout}>" for layout in LAYOUTS],
        "sample": ["sample<false>", "sample<true>", "logprobs"],
        "add": ["add"],
        "intrinsics": ["intrinsics"],
    }


def find_tool(name: str) -> str | None:
    """A CUDA binary utility from its wheel, the path, or a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(root).glob(f"*/bin/{name}*")):
            return str(path)
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def usage(cubin: Path) -> dict[str, tuple[int, int, int]]:
    """Mangled name -> (registers, stack bytes, shared bytes)."""
    text = subprocess.run([str(find_tool("cuobjdump")), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    pattern = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
    return {name: (int(reg), int(stack) + int(local), int(shared)) for name, reg, stack, shared, local in pattern.findall(text)}


def functions(cubin: Path) -> Iterator[tuple[str, list[str]]]:
    """(mangled name, lines) of each function's machine code."""
    text = subprocess.run([str(find_tool("nvdisasm")), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    for part in re.split(r"\n\.text\.", text)[1:]:
        name, _, body = part.partition(":")
        yield name, body.splitlines()


def instructions_per_32(lines: Sequence[str]) -> float:
    """Instructions of the hot loop per 32 weights and row: the loop with the most dp4a, of which 32 weights and a row need eight."""
    code: list[str] = []
    labels: dict[str, int] = {}
    best = (0, 0)
    for line in lines:
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        if instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_\w+)\)", instruction[1])
            if back and back[1] in labels:
                body = code[labels[back[1]] :]
                best = max(best, (sum("IDP.4A" in one for one in body), sum(not one.startswith("NOP") for one in body)))
    return 8 * best[1] / best[0] if best[0] else 0.0


def inspect(module: nvrtc.Module, count: bool) -> list[Facts]:
    """The facts of every entry of a compiled module, in the order of its names; ``count``: instructions too."""
    used = usage(module.cubin)
    counts = {name: instructions_per_32(lines) for name, lines in functions(module.cubin)} if count else {}
    return [Facts(entry, *used[name], counts.get(name, 0.0)) for entry, name in module.names.items()]


def broken_limits(arch: str, facts: Sequence[Facts]) -> list[str]:
    """What must not be: a stack, or more instructions than a limit allows."""
    found = [f"{arch}: {one.entry} has {one.stack} bytes of stack" for one in facts if one.stack]
    if arch == LIMITS_ARCH:
        found += [
            f"{arch}: {one.entry} takes {one.per_32:.1f} instructions per 32 weights, at most {LIMITS[one.entry]:.0f}"
            for one in facts if one.per_32 > LIMITS.get(one.entry, 1e9)
        ]  # fmt: skip
    return found


def left_out(table: dict[str, list[Facts]]) -> str:
    """The architectures that --arch kept from being compiled, said in the page."""
    missing = [arch for arch in ARCHITECTURES if arch not in table]
    return f" Not compiled for this page: {', '.join(missing)}." if missing else ""


def document(table: dict[str, list[Facts]], seconds: dict[str, float]) -> str:
    """docs/KERNELS.md."""
    lines = [
        "# Kernels: what the compiler made of them", "",
        "Written by `tools/lint_kernels.py`, which needs no GPU; do not edit. Compiled with NVRTC "
        f"{nvrtc.version()}, options `{' '.join(nvrtc.OPTIONS)}`." + left_out(table), "",
        "Registers per thread, then shared memory in bytes (sm_90). No instance has a stack on any of these architectures.", "",
        "| kernel | " + " | ".join(table) + " | shared |", "|---|" + "---|" * (len(table) + 1),
    ]  # fmt: skip
    by_entry = {arch: {one.entry: one for one in facts} for arch, facts in table.items()}
    some = by_entry.get(LIMITS_ARCH) or next(iter(by_entry.values()))
    for entry, facts in some.items():
        lines.append(f"| `{entry}` | " + " | ".join(str(by_entry[arch][entry].registers) for arch in table) + f" | {facts.shared} |")
    lines += ["", "Instructions of the hot loop per 32 weights and activation row.", ""]
    lines += ["| kernel | " + " | ".join(table) + " | limit |", "|---|" + "---|" * (len(table) + 1)]
    for entry, facts in some.items():
        if facts.per_32:
            counts = " | ".join(f"{by_entry[arch][entry].per_32:.1f}" for arch in table)
            lines.append(f"| `{entry}` | {counts} | {LIMITS.get(entry, '')} |")
    lines += ["", "Seconds to compile everything in parallel processes on the machine that wrote this: "]
    lines += [", ".join(f"{arch} {took:.0f}" for arch, took in seconds.items()) + ".", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), help="architectures, all by default")
    parser.add_argument("--check", action="store_true", help="check the limits, write nothing")
    parser.add_argument("--cache", type=Path, default=default_cache() / "lint", help="folder of compiled kernels")
    options = parser.parse_args()
    missing = [name for name in ("cuobjdump", "nvdisasm") if find_tool(name) is None]
    if nvrtc.load_library() is None or missing:
        print(f"not found: {', '.join(missing) or 'NVRTC'}; pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        return 1
    table: dict[str, list[Facts]] = {}
    seconds: dict[str, float] = {}
    problems: list[str] = []
    for arch in options.arch:
        modules = nvrtc.compile_modules(instances(), arch, options.cache)
        seconds[arch] = sum(module.seconds for module in modules.values())
        table[arch] = [one for stem, module in modules.items() for one in inspect(module, count=stem == "matvec")]
        problems += broken_limits(arch, table[arch])
        print(f"{arch}: {len(table[arch])} kernels, {seconds[arch]:.0f} s of compilation")
    print("\n".join(problems))
    if not options.check and not problems:
        DOCUMENT.write_text(document(table, seconds))
    print(json.dumps({"architectures": options.arch, "kernels": sum(map(len, table.values())), "problems": len(problems)}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
