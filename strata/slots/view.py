"""A frozen picture of the machine for ``/slots``, ``/metrics`` and the log, and the counters behind it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Counters:
    """Totals since the start. Keys of the dictionaries are fixed sets; every key is there from the beginning.

    ``reuse``: admitted requests by where their history came from. ``evictions``: histories lost for good, by reason (``seat``: its slot
    was needed and there is no shelf; ``memory``: its pages were needed; ``shelf_full``; ``host_full``; ``copy_failed``; ``error``).
    ``ended``: requests by how they ended. ``prompt_tokens`` = ``cached_tokens`` + those to read, of seated requests.
    ``drafts``: times that a slot had drafts checked; ``drafted`` and ``accepted``: the tokens, by source; ``accepted_at``: by their place
    among the drafts. Accepted are those that were delivered, not what lay behind a stop token. ``draft_seconds``: engine time for drafting.
    """

    ended: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "cancelled": 0, "failed": 0})
    reuse: dict[str, int] = field(default_factory=lambda: {"continued": 0, "borrowed": 0, "restored": 0, "none": 0})
    evictions: dict[str, int] = field(
        default_factory=lambda: {"seat": 0, "memory": 0, "shelf_full": 0, "host_full": 0, "copy_failed": 0, "error": 0}
    )
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    drafted: dict[str, int] = field(default_factory=lambda: {"mtp": 0, "lookup": 0})
    accepted: dict[str, int] = field(default_factory=lambda: {"mtp": 0, "lookup": 0})
    accepted_at: list[int] = field(default_factory=lambda: [0])
    draft_seconds: float = 0.0
    decode_windows: int = 0
    decode_rows: int = 0
    pad_rows: int = 0
    chunks: int = 0
    chunk_tokens: int = 0
    preemptions: int = 0
    parked: int = 0
    restored: int = 0
    unseated: int = 0

    def copy(self) -> Counters:
        return replace(
            self, ended=dict(self.ended), reuse=dict(self.reuse), evictions=dict(self.evictions),
            drafted=dict(self.drafted), accepted=dict(self.accepted), accepted_at=list(self.accepted_at),
        )


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot. ``state``: a ``SlotState`` value. ``tokens``: tokens in the cache. ``idle_s``: since one last left it, else 0.

    ``drafts``: windows that checked some; ``wanted``: how many are asked for now, of the model's head and of the lookup.
    """

    id: int
    group: int
    state: str
    tokens: int
    n_ctx: int
    request_id: str = ""
    prompt: int = 0
    cached: int = 0
    read: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    wanted: tuple[int, int] = (0, 0)
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MachineView:
    """Everything at one moment. ``pages_*`` add up to ``pages_total``; a shared page counts once, where it is needed most.
    ``groups``: groups of slots that have decode windows of their own just now."""

    slots: tuple[SlotView, ...]
    running: int
    waiting: int
    preempted: int
    windows_in_flight: int
    pages_total: int
    pages_free: int
    pages_busy: int
    pages_held: int
    pages_shelved: int
    page_tokens: int
    tokens_held: int
    shelved: int
    parked: int
    parked_bytes: int
    parked_limit: int
    draining: bool
    dead: str
    counters: Counters
    groups: int = 1
