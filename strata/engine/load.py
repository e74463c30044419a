"""From settings and an open model file to a running engine: sizes first (sizes.py), weights then.

The embedding of a model whose head is another matrix stays in the file and is decoded row by row, so the file must stay open as long
as the engine runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

from strata.config import Settings
from strata.engine.families import ModelConfig, read_config
from strata.engine.forward import StageModel
from strata.engine.kv import KVKind, PagedKV
from strata.engine.numpy_ops import NumpyOps
from strata.engine.pipeline import Pipeline
from strata.engine.resources import free_memory, processors
from strata.engine.results import Sampler
from strata.engine.sizes import plan
from strata.engine.threads import Threads
from strata.weights.gguf import GGUFFile, Tensor

Progress = Callable[[int, int], None]


def load_engine(settings: Settings, file: GGUFFile, progress: Progress = lambda done, total: None) -> Pipeline:
    """An engine for ``file``, not started. ``progress`` gets the bytes of weights taken and in all, in the loading thread.

    Raises ModelError for a model that is not served and SettingError for sizes that do not fit.
    """
    config = read_config(file)
    engine = assemble(settings, CountedFile(file, progress), config, [range(config.num_layers)])
    size = sum(tensor.size for tensor in file.tensors.values())
    progress(size, size)  # a file may hold tensors that nobody reads
    return engine


def assemble(settings: Settings, file: CountedFile, config: ModelConfig, spans: Sequence[range]) -> Pipeline:
    """An engine of one stage for each of ``spans``, consecutive layers in order; the threads are divided between them."""
    facts = plan(settings, config, free_memory(), len(spans))
    threads = max(1, (settings.threads or processors()) // len(spans))
    models = []
    with ExitStack() as opened:
        for number, span in enumerate(spans):
            ops = NumpyOps(threads, settings.deterministic)
            opened.callback(ops.close)
            kv = PagedKV(config, len(span), facts.num_pages, facts.page_tokens, cast(KVKind, settings.kv))
            name = f"stage {number} (cpu, layers {span.start} to {span.stop - 1})"
            models.append((name, StageModel(cast(GGUFFile, file), config, span, ops, kv)))
        return Pipeline(models, facts, Sampler(spread_over(ops.threads)), release=opened.pop_all().close)


def spread_over(threads: Threads) -> Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]:
    """``map`` over the threads of the last stage, which rest while tokens are picked."""

    def spread(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        todo = list(items)
        if len(todo) < 2:
            return [function(item) for item in todo]
        results: list[Any] = [None] * len(todo)

        def work(index: int) -> None:
            for number in range(index, len(todo), threads.count):
                results[number] = function(todo[number])

        threads.run(work)
        return results

    return spread


class CountedFile:
    """A model file that tells how much of it has been taken: what StageModel reads of a GGUFFile, and no more."""

    def __init__(self, file: GGUFFile, progress: Progress) -> None:
        self.path, self.metadata = file.path, file.metadata
        self.tensors = CountedTensors(file.tensors, progress)


class CountedTensors(Mapping[str, Tensor]):
    """Reports the stored bytes of all tensors taken so far; one that is taken again does not count again."""

    def __init__(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        self._tensors, self._progress = tensors, progress
        self._left = {name: tensor.size for name, tensor in tensors.items()}
        self._done, self._total = 0, sum(self._left.values())
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        with self._lock:
            size = self._left.pop(name, 0)
            self._done += size
            if size:
                self._progress(self._done, self._total)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
