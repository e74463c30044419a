"""Who drafts for the fake engine: always right, never right, right for a while, or as a number drawn from the place in the text has it."""

from __future__ import annotations

from strata.messages import DraftSource, Segment, Tokens
from tests.slots.fake_engine import VOCABULARY, Drafter, digest


def wrong(token: int) -> int:
    return (token + 1) % VOCABULARY


def right_for(count: int, source: DraftSource = "mtp", most: int = 9) -> Drafter:
    """As many drafts as are wanted (at most ``most``), the first ``count`` of them right."""

    def draft(segment: Segment, truth: list[int]) -> tuple[Tokens, DraftSource]:
        limits = segment.draft_limits
        wanted = min(most, limits.lookup if source == "lookup" else limits.mtp)
        return tuple(truth[:min(count, wanted)] + [wrong(token) for token in truth[min(count, wanted):wanted]]), source if wanted else ""

    return draft


def mixed(seed: int) -> Drafter:
    """Both sources, none to all that are wanted, none to all of them right; the same at the same place of the same text."""

    def draft(segment: Segment, truth: list[int]) -> tuple[Tokens, DraftSource]:
        limits = segment.draft_limits
        roll = digest(seed, truth[0] * VOCABULARY + truth[1], segment.end) >> 20
        source: DraftSource = "lookup" if limits.lookup and (roll % 3 == 0 or not limits.mtp) else "mtp"
        limit = limits.lookup if source == "lookup" else limits.mtp
        count, good = (roll >> 4) % (limit + 1), (roll >> 8) % (limit + 2)
        drafts = tuple(token if place < good else wrong(token) for place, token in enumerate(truth[:count]))
        return drafts, source if drafts else ""

    return draft


def greedy_engine(segment: Segment, truth: list[int]) -> tuple[Tokens, DraftSource]:
    """More drafts than were asked for."""
    return tuple(truth[:9]), "mtp"
