"""What an engine says it takes of its devices, for the metrics: beside sums over the file and over the arrays that were made."""

from __future__ import annotations

import math

from strata.config import Settings
from strata.engine.load import load_engine
from strata.weights.gguf import GGUFFile
from tests.engine.running import TINY


def test_stages_on_the_cpu_share_the_weights_and_the_pages() -> None:
    with GGUFFile.open(TINY) as file:
        matrices = {name: 4 * math.prod(tensor.shape) for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
        engine = load_engine(Settings(layer_split=(1,), context=128, batch=2, kv_memory_mib=2, threads=2), file)
        try:
            assert [memory.device for memory in engine.memory] == ["cpu", "cpu"] and all(memory.work for memory in engine.memory)
            layers = {number: sum(size for name, size in matrices.items() if name.startswith(f"blk.{number}.")) for number in range(4)}
            first, last = (memory.weights for memory in engine.memory)
            head = matrices.get("output.weight", matrices["token_embd.weight"])
            assert (first, last) == (layers[0], layers[1] + layers[2] + layers[3] + head)
            assert sum(memory.kv for memory in engine.memory) == engine.facts.num_pages * engine.facts.page_bytes
        finally:
            engine.close()
