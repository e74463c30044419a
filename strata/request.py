"""What a client asks for, once the server has checked and tokenised it. The nouns that follow from it are in messages.py."""

from __future__ import annotations

from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from a row of logits, in this order: logit bias, penalties, top_k, top_p, min_p, draw.

    ``temperature`` 0 is greedy. ``top_k`` 0 is off, ``top_p`` 1 is off, ``min_p`` 0 is off. Penalties as in vLLM: presence and
    frequency count generated tokens only, repetition counts prompt and generated ones. ``seed`` (0 .. 2**63-1) is always
    concrete: the server draws one where the client gave none. ``choice`` numbers the choices of one request (``n`` > 1).
    ``logprobs`` is -1 for none, else how many of the best tokens to report beside the chosen one (raw logits, before the filters).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    logprobs: int = -1

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """What a request says about where it sits.

    ``slot``: a pinned slot id (``id_slot``). ``key``: the client's conversation key. ``tenant``: who may reuse its history
    (a digest of the API key; "" when reuse is shared). ``reuse``: may continue or borrow held history (``cache_prompt``).
    ``keep``: stays held when done and may displace others (``strata_checkpoint``).
    """

    slot: int | None = None
    key: str = ""
    tenant: str = ""
    reuse: bool = True
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one HTTP request, checked and tokenised.

    ``prompt``: at least one token. ``max_tokens`` >= 0, and prompt + max_tokens fits the context. ``stop_tokens`` end the
    answer (empty under ``ignore_eos``). ``turn_marks``: rising token counts, each the end of one user turn in ``prompt``; the
    last is the conversation's anchor (a raw prompt has none: its anchor is ``len(prompt) - 1``). ``prompt_logprobs``: -1 for
    none, else as ``Sampling.logprobs`` for every prompt token after the first (turns reuse off). ``deadline``: seconds
    that it may wait in the queue, 0 for the server's default.
    """

    id: str
    prompt: Tokens
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    turn_marks: Tokens = ()
    placement: Placement = Placement()
    prompt_logprobs: int = -1
    deadline: float = 0.0

    @property
    def anchor(self) -> int:
        return self.turn_marks[-1] if self.turn_marks else len(self.prompt) - 1
