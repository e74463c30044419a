"""Trains an MTP head for a model on text that the model writes itself: generate and train (at the same time), then eval."""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

import torch

from tools.train_mtp.generate import generate
from tools.train_mtp.tables import evaluate
from tools.train_mtp.train import train

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ROOT / "models/mtp-held-out.npz"


MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt(3), glibc


def keep_memory() -> None:
    """Let the C library keep what torch frees: fresh pages for every large tensor cost a quarter of a training step. Linux with glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for limit in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            mallopt(limit, (1 << 31) - 1)


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    keep_memory()
    torch.set_num_threads(options.threads)
    options.dtype = getattr(torch, getattr(options, "dtype", "float32"))
    options.run(options)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="train_mtp", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    one = command(commands, "generate", generate, "let the model write texts, with the hidden states a head is given")
    one.add_argument("--out", type=Path, required=True, help="the folder of the shards (about 70 MB for 50,000 tokens)")
    one.add_argument("--seed", type=int, default=1, help="of scripts and draws; give each process its own (default %(default)s)")
    one.add_argument("--minutes", type=float, default=60, help="how long (default %(default)s)")
    one.add_argument("--rows", type=int, default=384, help="texts at once (default %(default)s)")
    products(one)
    one.add_argument("--length", type=int, default=128, help="tokens of a text at most (default %(default)s)")

    one = command(commands, "train", train, "train a head on the texts, while they are being written or after")
    one.add_argument("--text", type=Path, required=True, help="the folder of the shards")
    one.add_argument("--out", type=Path, required=True, help="the head file (GGUF), written again and again")
    one.add_argument("--start", type=Path, help="a head file to go on from (default: a new head, made from the model's last layer)")
    one.add_argument("--texts", type=Path, default=TEXTS, help="the held-out texts, written where missing (default %(default)s)")
    one.add_argument("--minutes", type=float, default=60, help="how long; the learning rate is planned by it (default %(default)s)")
    products(one)
    one.add_argument("--every", type=float, default=5, help="minutes between reports and saved heads (default %(default)s)")
    one.add_argument("--passes", type=int, default=3, help="how often a text is read at most; then it waits for more (default %(default)s)")
    one.add_argument("--batch", type=int, default=16, help="texts a step (default %(default)s)")
    one.add_argument("--vocab", type=int, default=8192, help="frequent ids that the loss runs over (default %(default)s)")
    one.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="for the matrices (default %(default)s)")
    one.add_argument("--rate", type=float, default=1e-3, help="AdamW's learning rate (default %(default)s)")
    one.add_argument("--muon-rate", type=float, default=1.5e-3, help="Muon's learning rate, in AdamW's scale (default %(default)s)")
    one.add_argument("--steady", type=float, default=0.3, help="the share of the time before the rate falls (default %(default)s)")
    one.add_argument("--average", type=float, default=0.98, help="of the weights over steps, for the head kept (default %(default)s)")
    one.add_argument("--seed", type=int, default=1, help="of the order of texts (default %(default)s)")

    one = command(commands, "eval", evaluate, "judge a head on held-out prompts, as a server would use it, and print the tables")
    one.add_argument("--head", type=Path, default=ROOT / "configs/heads/smollm2-135m-mtp.gguf", help="the head file (default %(default)s)")
    one.add_argument("--drafts", type=int, default=3, help="drafts of a window at most (default %(default)s)")
    one.add_argument("--texts", type=Path, default=TEXTS, help="the held-out texts, written where missing (default %(default)s)")
    return top


def command(commands: object, name: str, run: object, about: str) -> argparse.ArgumentParser:
    one = commands.add_parser(name, help=about, description=about)  # type: ignore[attr-defined]
    one.set_defaults(run=run)
    model = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
    one.add_argument("--model", type=Path, default=model, help="the GGUF model (default %(default)s)")
    one.add_argument("--threads", type=int, default=1, help="of torch; two processes of one beat one of two (default %(default)s)")
    return one  # type: ignore[no-any-return]


def products(one: argparse.ArgumentParser) -> None:
    one.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16",
                     help="of the products; float32 where the processor has no bfloat16 (default %(default)s)")
