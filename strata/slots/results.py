"""What one segment's result means for its run: commit what was fed, take what was picked, see whether that was the end."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from strata.messages import NewTokens, Progress, Segment, SegmentResult, TokenLogprob, Tokens
from strata.slots.events import Command
from strata.slots.slot import Outcome, Run, Slot
from strata.slots.states import RequestState, SlotEvent, SlotState
from strata.slots.view import Counters


class Advance(Enum):
    """OVER: the run had ended (or is being preempted) while the window was in flight."""

    GOES_ON = "goes on"
    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"
    OVER = "over"


class Ledger(Protocol):
    """What this module needs of the machine."""

    now: float
    out: list[Command]
    counters: Counters


def advance(run: Run, is_decode: bool, segment: Segment, result: SegmentResult, ledger: Ledger) -> Advance:
    """Apply one result. Tokens that were fed are in the cache whatever became of the request meanwhile, so they are always committed.

    A preempted request whose last window was still in flight takes what that window brings like any other.
    """
    conversation, slot = run.conversation, run.slot
    assert conversation is not None and slot is not None
    if slot.outcome is Outcome.DROP and slot.state is SlotState.LEAVING:
        return Advance.OVER  # an earlier window was lost, so this one worked on nothing
    if result.error:
        return Advance.FAILED
    if result.snapshots:
        conversation.snapshots.extend(result.snapshots)
    if run.state is RequestState.ENDED:
        fed = len(segment.tokens) - segment.num_drafts + result.accepted
        conversation.tokens.extend(segment.tokens[:fed])
        return Advance.OVER
    if is_decode:
        conversation.tokens.append(segment.tokens[0])
        picks, accepted = _accepted(run, segment, result, ledger.counters) if segment.num_drafts else (result.picks, 0)
        return _take(run, picks, result.logprobs[:len(picks)], ledger, accepted=accepted)
    conversation.tokens.frombytes(run.packed_slice(segment.start, segment.end))
    return _read(run, slot, segment, result, ledger)


def _read(run: Run, slot: Slot, segment: Segment, result: SegmentResult, ledger: Ledger) -> Advance:
    """A chunk is in the cache. After a history was lost and read again, prompt logprobs that were delivered are not sent twice."""
    prompt = len(run.request.prompt)
    logprobs = result.prompt_logprobs[max(0, run.logprobs_read - segment.start):max(0, prompt - 1 - segment.start)]
    run.logprobs_read = max(run.logprobs_read, segment.end)
    ledger.out.append(Progress(run.request.id, min(segment.end, prompt), prompt, run.cached, slot.id))
    if logprobs and not result.picks:
        ledger.out.append(NewTokens(run.request.id, (), (), logprobs))
    if segment.end < run.total:
        return Advance.GOES_ON
    if slot.state is SlotState.READING:
        slot.step(SlotEvent.PROMPT_READ)
    return _take(run, result.picks, result.logprobs, ledger, logprobs) if result.picks else Advance.LENGTH


def _take(
    run: Run, picks: Tokens, logprobs: tuple[TokenLogprob, ...], ledger: Ledger, prompt_logprobs: tuple[TokenLogprob, ...] = (),
    accepted: int = 0,
) -> Advance:
    """Picked tokens go to the client; the decode path, so nothing here grows with the history."""
    request = run.request
    run.generated.extend(picks)
    ledger.counters.generated_tokens += len(picks)
    ledger.out.append(NewTokens(request.id, picks, logprobs, prompt_logprobs, accepted))
    run.last_at = ledger.now
    if run.first_at is None:
        run.first_at = ledger.now
    if picks[-1] in request.stop_tokens:
        return Advance.STOP
    return Advance.LENGTH if len(run.generated) >= run.limit else Advance.GOES_ON


def _accepted(run: Run, segment: Segment, result: SegmentResult, counters: Counters) -> tuple[Tokens, int]:
    """The tokens that several rows brought, and how many of them were drafts: up to the first stop token or the limit, whatever was
    accepted beyond.

    All drafts that had a row count as drafted; those that are delivered count as accepted. A stop string is the server's to see.
    """
    drafts, conversation = run.drafts, run.conversation
    assert drafts is not None and conversation is not None
    picks, stops, drafted = result.picks[:run.limit - len(run.generated)], run.request.stop_tokens, segment.num_drafts
    if stops:
        ends = [place for place, token in enumerate(picks) if token in stops]
        picks = picks[:ends[0] + 1] if ends else picks
    accepted = min(result.accepted, len(picks))
    conversation.tokens.extend(picks[:-1])
    run.submitted = len(conversation.tokens)
    drafts.windows += 1
    run.drafted += drafted
    run.accepted += accepted
    counters.drafts += 1
    counters.drafted[drafts.flying] += drafted
    counters.accepted[drafts.flying] += accepted
    for place in range(accepted):
        counters.accepted_at[place] += 1
    return picks, accepted
