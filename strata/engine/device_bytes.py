"""Bytes of what a stage keeps on a device, and what no device can keep: from shapes alone, before anything is read."""

from __future__ import annotations

import math
from functools import lru_cache

from strata.engine.device_space import HEAD_ROWS, DraftSizes, DraftSpace, Tally, WindowSizes, Workspace, gated_widths
from strata.engine.draft_ops import FILL_LAUNCHES, STEP_LAUNCHES
from strata.engine.draft_upload import DraftSender
from strata.engine.families import ModelConfig
from strata.engine.graphs import NODE_BYTES, ROW_BUCKETS, graph_bytes, launches_of
from strata.engine.kernel_ops import routing_of
from strata.engine.mtp_file import Heads
from strata.engine.pick_room import PickRoom
from strata.engine.rope import Rope
from strata.engine.window_upload import widest
from strata.errors import ModelError
from strata.kernels.pages import PageShape
from strata.kernels.route import MAX_EXPERTS
from strata.weights.gguf import GGUFFile, Tensor
from strata.weights.layouts import PACKED3, padded
from strata.weights.recode import layouts_for

PAGE_TOKENS = 64


def check_model(file: GGUFFile, config: ModelConfig) -> None:
    """Raises ModelError for what the kernels cannot hold."""
    try:
        PageShape(1, config.num_kv_heads, config.head_dim, PAGE_TOKENS)
        inner = gated_widths(config)
        if config.experts is not None:
            routing_of(config.experts)
            inner.append(config.experts.width)
            if config.experts.count > MAX_EXPERTS or config.width % 4:
                raise ValueError(f"{config.experts.count} experts of {config.width} columns are not served on a device")
        for width in inner:
            if width % 32:
                raise ValueError(f"a feed-forward network {width} wide is not served on a device: a multiple of 32 is")
    except ValueError as error:
        raise ModelError(f"{file.path}: {error}; use --device cpu") from error


def weight_bytes(file: GGUFFile, config: ModelConfig, span: range, packed: bool) -> int:
    """Bytes of layers ``span`` on a device, the model's ends included where the span has them."""
    ends = {"token_embd": span.start == 0 or (config.tied and span.stop == config.num_layers), "output": span.stop == config.num_layers}
    total = 0
    for name, tensor in file.tensors.items():
        part = name.split(".")
        if not (int(part[1]) in span if part[0] == "blk" else ends.get(part[0], span.stop == config.num_layers)):
            continue
        total += tensor_bytes(tensor, packed)
    return total


def tensor_bytes(tensor: Tensor, packed: bool) -> int:
    """Bytes of a tensor on a device: a matrix (or one for each expert) in its layout, a vector or a router as float32."""
    *outer, columns = tensor.shape
    rows = math.prod(outer)
    if not outer or ".ffn_gate_inp." in tensor.name:
        return 4 * rows * columns
    layouts = layouts_for(tensor.type)
    layout = PACKED3 if packed and PACKED3 in layouts else layouts[0]
    return layout.bytes(rows, padded(columns))


@lru_cache(maxsize=256)  # a plan is sought by trying contexts
def work_bytes(config: ModelConfig, sizes: WindowSizes, is_last: bool, kv: str = "int8") -> int:
    """Bytes of a stage's work space, of a window's metadata and, on the last stage, of what tokens are picked in."""
    tally = Tally()
    shape = PageShape(1, config.num_kv_heads, config.head_dim, PAGE_TOKENS, kv)
    Workspace(tally.device, config, shape, sizes, tally.stream, is_last)
    if is_last:
        PickRoom(tally.device, tally.stream, HEAD_ROWS, config.vocab_size)
    return tally.nbytes + 4 * widest(sizes.rows, sizes.context, PAGE_TOKENS, config.rope.dims // 2)


def page_bytes(config: ModelConfig, num_layers: int, kv: str) -> int:
    """Bytes of one page over so many layers."""
    return PageShape(num_layers, config.num_kv_heads, config.head_dim, PAGE_TOKENS, kv).page_bytes


# ---------------------------------------------------------------- a head that drafts


def draft_weight_bytes(heads: Heads, file: GGUFFile, config: ModelConfig, is_first: bool, packed: bool) -> int:
    """Bytes of the first head behind a trunk that ends on the same stage; ``is_first``: the embedding is there, too."""
    at = f"blk.{heads.config.mtp_blocks[0]}."
    embedding, output = f"{at}nextn.embed_tokens.weight", f"{at}nextn.shared_head_head.weight"
    own = {name: tensor for name, tensor in heads.file.tensors.items() if name.startswith(at)}
    total = sum(tensor_bytes(tensor, packed) for name, tensor in own.items() if name != output)
    if heads.vocabulary is not None:
        head = own[output] if output in own else file.tensors["token_embd.weight" if config.tied else "output.weight"]
        total += tensor_bytes(head, packed) // head.shape[0] * len(heads.vocabulary)
    elif output in own:
        total += tensor_bytes(own[output], packed)
    if embedding not in own and not is_first and not config.tied:
        total += tensor_bytes(file.tensors["token_embd.weight"], packed)
    return total + 4 * (config.vocab_size if heads.vocabulary is None else len(heads.vocabulary))


@lru_cache(maxsize=256)
def draft_work_bytes(config: ModelConfig, sizes: DraftSizes) -> int:
    """Bytes of a head's work space and its rows' metadata."""
    tally = Tally()
    DraftSpace(tally.device, config, sizes, tally.stream)
    DraftSender(tally.device, tally.stream, sizes, Rope(config.rope), tally.allocate((0,), "i4"), 0)
    return tally.nbytes


def draft_graph_bytes(heads: Heads, slots: int, context: int) -> int:
    """Device memory set aside for a head's graphs."""
    launches = STEP_LAUNCHES + launches_of(heads.config, heads.config.mtp_blocks[:1])
    return graph_bytes(launches, slots, context) + len(ROW_BUCKETS) * FILL_LAUNCHES * NODE_BYTES
