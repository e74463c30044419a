"""The nouns that layers share, and the protocol in which slots and engine meet.

A request's way: the server makes a ``Request``; the slot machine cuts it into ``Window``s and gives them to an ``Engine``;
the engine answers with one ``WindowDone`` (or ``EngineFailed``) per window; the machine turns those into ``RequestEvent``s,
which the server writes to the client. Everything here is frozen, plain data: no tensors, no sockets, no clock.
Positions count from 0; a token at position p attends to positions 0..p. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from strata.request import Sampling
from strata.request import Tokens as Tokens

FinishReason = Literal["stop", "length"]
DraftSource = Literal["", "mtp", "lookup"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's logprob and the best alternatives ((id, logprob), best first). Natural logarithms."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How many drafts each source may propose for a slot's next window: the model's MTP head, a lookup in the slot's own history.

    A lookup that finds enough goes first; the head then does no work.
    """

    mtp: int = 0
    lookup: int = 0


NO_DRAFTS = DraftLimits()


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one slot in a window.

    ``tokens`` go to positions ``start ..``. ``pages`` is the slot's page table, at least up to the last position written. The
    last ``num_drafts`` tokens are drafts to verify. ``sampling`` None: a part of a prompt whose end is not reached, nothing is picked.
    Otherwise a token is picked for the last row (and for each row before a draft, while the draft equals the pick).
    ``history``: (prompt, generated so far). ``prompt_logprobs``: -1 for none, else the number of
    alternatives wanted for every row: row i reports the logprob of the token at position i + 1; ``next_token`` is the prompt
    token after the segment (None at the prompt's end), so that a cut between chunks loses no logprob. ``draft_limits``: how
    many drafts are wanted behind what this window picks. ``history`` is set where penalties or drafts need it.
    """

    request_id: str
    slot: int
    start: int
    tokens: Tokens
    pages: Tokens
    sampling: Sampling | None = None
    num_drafts: int = 0
    history: tuple[Tokens, Sequence[int]] | None = None
    prompt_logprobs: int = -1
    next_token: int | None = None
    draft_limits: DraftLimits = NO_DRAFTS

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Window:
    """One pass through all stages: either one decode row (and drafts) of several slots, or one chunk of one prompt."""

    id: int
    kind: Literal["decode", "prompt"]
    group: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """What a window did for one segment, in the window's order.

    ``picks``: tokens picked (empty for a part of a prompt); ``accepted`` of the segment's drafts equalled their picks, and
    ``len(picks) == accepted + 1``. ``logprobs`` go with ``picks`` where asked for. ``error``: this row failed alone (a NaN row),
    the request must end with an ``EngineError``. ``snapshots``: positions up to which a resume is now possible, for models whose
    state cannot be cut anywhere (empty for attention-only models). ``drafts``: proposed for the positions after the last pick,
    by ``draft_source``.
    """

    picks: Tokens = ()
    accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    snapshots: Tokens = ()
    drafts: Tokens = ()
    draft_source: DraftSource = ""


@dataclass(frozen=True, slots=True)
class WindowDone:
    """A window has left the last stage; its pages may be reused.

    ``seconds``: engine time, not waiting; ``stage_seconds``: by stage; ``draft_seconds``: the part of it that went into drafts.
    """

    window_id: int
    results: tuple[SegmentResult, ...]
    seconds: float = 0.0
    stage_seconds: tuple[float, ...] = ()
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A ``PageCopy`` finished. ``error`` is empty on success; on failure nothing may be read from its target."""

    copy_id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine lost these windows (empty: it is dead for good). ``message`` names the stage and the cause."""

    message: str
    window_ids: Tokens = ()


EngineEvent = WindowDone | CopyDone | EngineFailed


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Move whole pages between the device pool and host memory (parking). ``host`` is the machine's handle for the image.

    ``out``: device -> host; ``in``: host -> device, the image's first ``len(pages)`` pages (a prefix can be read from it; it stays);
    ``drop``: forget the image (``pages`` empty, no ``CopyDone``).
    """

    id: int
    direction: Literal["out", "in", "drop"]
    host: int
    pages: Tokens = ()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the slot machine may know about an engine; never which model it runs.

    ``page_tokens``: positions per KV page. ``num_pages``: pages in the device pool. ``page_bytes``: of one page over all layers.
    ``context``: longest prompt + answer of one request. ``prompt_grid``: prompt chunks end at multiples of this absolute position
    (or at the prompt's end). ``chunk``: default chunk, a multiple of the grid. ``max_rows``: rows in a decode window.
    ``snapshots``: True where a history can only be resumed at positions reported as ``SegmentResult.snapshots``.
    ``max_drafts``: drafts that a segment may hold (``--spec`` - 1); ``draft_sources``: who can propose them.
    """

    num_pages: int
    page_tokens: int
    context: int
    page_bytes: int = 0
    prompt_grid: int = 1
    chunk: int = 512
    max_rows: int = 32
    num_stages: int = 1
    snapshots: bool = False
    max_drafts: int = 0
    draft_sources: tuple[DraftSource, ...] = ()


class Engine(Protocol):
    """Runs windows in the order given. No call blocks; answers come through ``deliver``, from any thread, once per window or copy."""

    facts: EngineFacts

    def start(self, deliver: Callable[[EngineEvent], None]) -> None: ...

    def submit(self, window: Window) -> None: ...

    def copy(self, copy: PageCopy) -> None: ...

    def close(self) -> None:
        """Stop the threads; windows still queued are dropped. Idempotent."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and times of one request. Seconds; tokens.

    ``cached``: prompt tokens taken from held history; ``prompt - cached`` were read. ``queue_s``: until a slot was given;
    ``prompt_s``: from there to the first token; ``decode_s``: from the first to the last.
    """

    prompt: int
    cached: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    queue_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A slot was given, or a chunk was read: ``read`` of ``total`` prompt tokens are in the cache, ``cached`` of them reused."""

    request_id: str
    read: int
    total: int
    cached: int
    slot: int


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens picked since the last event, oldest first; ``logprobs`` and ``prompt_logprobs`` where asked for.

    The first ``accepted`` of them had been drafted.
    """

    request_id: str
    tokens: Tokens
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal. ``stop``: a stop token (the last of the tokens delivered) or the server's own stop; ``length``: no room left."""

    request_id: str
    reason: FinishReason
    usage: Usage
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal. ``error`` is a ``StrataError``; ``usage`` says how far it came."""

    request_id: str
    error: Exception
    usage: Usage = Usage(prompt=0)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Terminal: the client left, or the server asked. Nobody reads it but the log and the metrics."""

    request_id: str
    usage: Usage
    slot: int = -1


Terminal = Finished | Failed | Cancelled
RequestEvent = Progress | NewTokens | Terminal
