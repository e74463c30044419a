"""A model file, opened and taken apart: tokenizer, chat template, engine, and the facts that clients may ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from strata.config import Settings
from strata.engine.families import read_config
from strata.engine.load import describe_engine, load_engine
from strata.engine.pipeline import Pipeline
from strata.errors import ModelError
from strata.server.service import Model
from strata.text.template import ChatTemplate
from strata.text.tokenizer import Tokenizer
from strata.weights.gguf import GGUFFile


@dataclass(frozen=True)
class LoadedModel:
    """Everything that comes out of the file. ``close`` it after the engine: weights may be read from the mapped file."""

    file: GGUFFile
    tokenizer: Tokenizer
    template: ChatTemplate | None
    engine: Pipeline
    facts: Model

    def close(self) -> None:
        """Stop the engine and close the file. Idempotent."""
        self.engine.close()
        self.file.close()


def load_model(settings: Settings, progress: Callable[[int, int], None]) -> LoadedModel:
    """Open ``settings.model`` and build everything. Takes seconds: not for the loop thread. Raises ``StartError``."""
    path = Path(str(settings.model))
    with ExitStack() as undo:
        file = GGUFFile.open(path)
        undo.callback(file.close)
        tokenizer, template = _text_of(file)
        engine = load_engine(settings, file, progress)
        undo.callback(engine.close)
        loaded = LoadedModel(file, tokenizer, template, engine, _facts(settings, file, tokenizer, engine))
        undo.pop_all()
    return loaded


def describe_model(settings: Settings) -> str:
    """What would be served and the memory it needs, without reading the weights. Raises ``StartError`` as ``load_model`` does."""
    with GGUFFile.open(Path(str(settings.model))) as file:
        tokenizer, template = _text_of(file)
        config = read_config(file)
        return "\n".join((
            f"model    {file.path.name}: {file.metadata.get('general.architecture')}, {config.num_layers} layers, {file.size / 1e6:.0f} MB",
            f"text     {tokenizer.vocab_size} tokens, {'a' if template else 'no'} chat template",
            *(f"engine   {line}" for line in describe_engine(settings, file)),
        ))


def _text_of(file: GGUFFile) -> tuple[Tokenizer, ChatTemplate | None]:
    try:
        template = ChatTemplate.from_metadata(file.metadata)
        return Tokenizer.from_metadata(file.metadata), template if template.exists else None
    except ModelError as error:
        raise ModelError(f"{file.path.name}: {error}") from error


def _facts(settings: Settings, file: GGUFFile, tokenizer: Tokenizer, engine: Pipeline) -> Model:
    architecture = str(file.metadata.get("general.architecture", ""))
    trained = file.metadata.get(f"{architecture}.context_length", 0)
    return Model(
        name=settings.model_name or file.path.stem,
        context=engine.facts.context,
        vocab_size=tokenizer.vocab_size,
        created=int(file.path.stat().st_mtime),
        aliases=settings.aliases,
        trained_context=trained if isinstance(trained, int) else 0,
        architecture=architecture,
        parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        file=file.path.name,
        file_bytes=file.size,
    )
