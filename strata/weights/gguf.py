"""A GGUF model on disk: one file or several parts, mapped, checked, and seen as one mapping of names to tensors.

A split model's parts are called ``name-00001-of-00003.gguf``; any of them opens the whole. The first holds the metadata, and
each has its own tensor infos. Opening reads headers only; weights come in page by page when a tensor's data is used.

Tensor types are read from the tensors: ``general.file_type`` is a label, often wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

from strata.errors import ModelError
from strata.weights.cursor import quoted
from strata.weights.shard import Shard, Tensor, read_shard, whole_number

__all__ = ["GGUFFile", "Tensor"]

PART_NAME = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
LISTED_NAMES = 8


class GGUFFile:
    """A model file, open and checked.

    Attributes: ``path`` as given to ``open``; ``metadata`` key -> int, float, bool, str, NumPy array (of numbers), or list of str;
    ``tensors`` name -> Tensor, in file order; ``size`` bytes of all parts. Close it, or use ``with``, when the weights are loaded.
    """

    def __init__(self, path: Path, shards: list[Shard]) -> None:
        """From the parts of one model, in order; use ``open``. Raises ModelError if two hold a tensor of the same name."""
        self.path = path
        self._files = [shard.file for shard in shards]
        self.size = sum(file.size for file in self._files)
        self.metadata: Mapping[str, object] = MappingProxyType(shards[0].metadata)
        tensors: dict[str, Tensor] = {}
        for tensor in (tensor for shard in shards for tensor in shard.tensors):
            if tensor.name in tensors:
                raise ModelError(
                    f"{tensor.file.path}: tensor {quoted(tensor.name)} is also in {tensors[tensor.name].file.path.name}; "
                    "expected each tensor in one part; download all parts of one model again"
                )
            tensors[tensor.name] = tensor
        self.tensors: Mapping[str, Tensor] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map and check the model at ``path``, all parts of it. Raises ModelError, one line that says what to do."""
        path = Path(path)
        with ExitStack() as undo:
            shards = [read_shard(path)]
            undo.callback(shards[0].file.close)
            if whole_number(path, shards[0].metadata, "split.count", 1) > 1:
                shards = read_parts(shards[0], undo)
            model = cls(path, shards)
            undo.pop_all()
        return model

    def bind(self, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Tensor]:
        """The tensors of these names; of the optional ones, those that exist.

        Raises ModelError that lists names missing from the file and names in the file that nothing asked for: a tensor left
        out silently is a wrong model. Put names that may be ignored under ``optional``.
        """
        wanted = list(required)
        known = {*wanted, *optional}
        missing = [name for name in wanted if name not in self.tensors]
        unexpected = [name for name in self.tensors if name not in known]
        if missing or unexpected:
            architecture = self.metadata.get("general.architecture")
            raise ModelError(
                f"{self.path}: {len(missing)} tensors missing{listed(missing)} and {len(unexpected)} unexpected{listed(unexpected)}; "
                f"expected the names of llama.cpp's converter for architecture {quoted(str(architecture))}"
                f"{prefix_hint(missing, unexpected)}; convert the model again"
            )
        return {name: tensor for name, tensor in self.tensors.items() if name in known}

    def check_size(self) -> None:
        """Raises ModelError if a part has become shorter since it was opened. ``Tensor.data`` asks this by itself."""
        for file in self._files:
            file.check_size()

    def close(self) -> None:
        """Let go of the files. Arrays taken from ``Tensor.data`` stay valid and keep their part mapped."""
        for file in self._files:
            file.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listed(names: list[str]) -> str:
    """`` (a, b, ...)`` for a message: the first few names."""
    if not names:
        return ""
    more = f", {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return f" ({', '.join(quoted(name) for name in names[:LISTED_NAMES])}{more})"


def prefix_hint(missing: list[str], unexpected: list[str]) -> str:
    """Tells of one prefix before every name, the mark of some converters."""
    for name in unexpected[:1]:
        for plain in missing:
            prefix = name.removesuffix(plain)
            if prefix != name and {prefix + one for one in missing} <= set(unexpected):
                return f" (here every name starts with {quoted(prefix)})"
    return ""


def read_parts(opened: Shard, undo: ExitStack) -> list[Shard]:
    """All parts of the split model that ``opened`` belongs to, in order; ``undo`` learns to close them. Raises ModelError."""
    path = opened.file.path
    count = whole_number(path, opened.metadata, "split.count", 1)
    match = PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{path}: is one of {count} parts (split.count), expected a name that ends in -00001-of-{count:05d}.gguf; "
            "give the parts their original names"
        )
    paths = [path.with_name(f"{match['name']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    absent = [part.name for part in paths if not part.is_file()]
    if absent:
        raise ModelError(
            f"{path}: {count} parts expected, {count - len(absent)} found; missing{listed(absent)}; download the missing parts into the "
            "same folder"
        )
    shards = []
    for part in paths:
        shards.append(opened if part == path else read_shard(part))
        undo.callback(shards[-1].file.close)
    check_parts(shards)
    return shards


def check_parts(shards: list[Shard]) -> None:
    """Each part says it is the one its name says, and together they have all tensors."""
    count = len(shards)
    for number, shard in enumerate(shards):
        said = [whole_number(shard.file.path, shard.metadata, key, -1) for key in ("split.no", "split.count")]
        if said != [number, count]:
            raise ModelError(
                f"{shard.file.path}: says split.no {said[0]} and split.count {said[1]}, expected {number} and {count}; the parts are of "
                "different models or renamed, download them again"
            )
    found = sum(len(shard.tensors) for shard in shards)
    total = whole_number(shards[0].file.path, shards[0].metadata, "split.tensors.count", found)
    if found != total:
        raise ModelError(
            f"{shards[0].file.path}: {total} tensors in all parts expected (split.tensors.count), {found} found; the parts are of "
            "different models, download them again"
        )
