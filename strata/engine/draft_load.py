"""Puts drafting behind the last stage's model: the sources that exist, and pages that keep what a head needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from strata.config import Settings
from strata.engine.architecture import ModelConfig
from strata.engine.draft import Drafter, Source
from strata.engine.draft_choice import DraftChoice
from strata.engine.draft_vocab import DraftVocabulary
from strata.engine.lookup import Lookup
from strata.engine.mtp import MtpBlock, MtpSource, Trunk
from strata.engine.mtp_file import Heads, spec_tokens
from strata.engine.page_hidden import PageHidden, PagesWithHidden
from strata.engine.sampling import Spread
from strata.engine.stage import StageModel
from strata.messages import EngineFacts


log = logging.getLogger(__name__)
USUAL_ROWS = 128


class LastStage(StageModel, Trunk, Protocol):
    """A last stage's model that keeps the final hidden states of its window."""


def draft_facts(settings: Settings, config: ModelConfig, facts: EngineFacts, heads: Heads | None) -> EngineFacts:
    """``facts`` with what drafting changes: windows hold each slot's drafts beside its token; where nobody set how many, as far as a
    window of ``USUAL_ROWS`` rows goes or three for each slot."""
    spec = spec_tokens(settings, config)
    if spec == 1:
        return facts
    rows = settings.batch * spec
    return replace(
        facts, max_rows=rows if settings.spec else min(rows, max(USUAL_ROWS, 4 * settings.batch)), max_drafts=spec - 1,
        draft_sources=("lookup",) if heads is None else ("lookup", "mtp"),
    )


def log_drafting(name: str, config: ModelConfig, facts: EngineFacts) -> None:
    """Who drafts for the model of this ``name``, and who does not although its file says so."""
    if not facts.max_drafts:
        return
    if config.mtp_promised and "mtp" not in facts.draft_sources:
        log.warning("%s: promises a head that drafts (nextn_predict_layers) and has none; served without", name)
    known = {"mtp": "the model's head", "lookup": "the slot's own text"}
    log.info("drafts: up to %d behind each token, from %s", facts.max_drafts, " and ".join(known[each] for each in facts.draft_sources))


def with_drafts(
    model: LastStage, blocks: Sequence[MtpBlock], heads: Heads | None, facts: EngineFacts, spread: Spread = map
) -> tuple[StageModel, Drafter]:
    """The last stage as the pipeline should have it, and who drafts behind it; ``blocks`` are what computes the ``heads``."""
    sources: list[Source] = [Lookup()]
    if heads is None:
        return model, Drafter(sources)
    pages = PageHidden(facts.num_pages, facts.page_tokens, heads.config.width)
    vocab_size = heads.config.vocab_size
    vocabulary = None if heads.vocabulary is None else DraftVocabulary(heads.vocabulary, vocab_size)
    sources.append(MtpSource(blocks, model, pages, DraftChoice(vocabulary, vocab_size, spread)))
    return PagesWithHidden(model, pages), Drafter(sources)
