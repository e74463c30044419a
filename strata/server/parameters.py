"""The parameters that completions and chat share: from JSON fields to checked values.

What cannot be honoured is refused by name: a grammar or a schema that would silently not be kept is worse than a 400. What
changes nothing (``user``, ``store``, ``metadata`` ...) is ignored.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from strata.config.settings import Settings
from strata.errors import ClientError
from strata.request import Placement, Sampling
from strata.server.fields import Fields, as_integer

MAX_CHOICES = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
# A seed drawn here is reported in JSON, where JavaScript keeps no more bits of an integer: it must be able to send it back.
SEED_BITS = 53
# Below this the division by the temperature could overflow; the result would be the likeliest token anyway.
GREEDY_BELOW = 1e-5

REFUSED = (
    "audio", "chat_template", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema",
    "n_discard", "prompt_embeds", "prompt_logprobs", "structured_outputs", "truncate_prompt_tokens",
)
"""Fields that would change the answer and are not served. 0, false, "" and empty lists and objects ask for nothing."""


@dataclass(frozen=True, slots=True)
class Output:
    """How the answer is written. ``logprobs``: -1 none, else alternatives per token."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    progress: bool = False
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    keep_special: bool = False
    logprobs: int = -1
    token_ids: bool = False
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Parameters:
    """``max_tokens`` None: what is left of the context. ``sampling.choice`` is 0; choices count up from it."""

    sampling: Sampling
    choices: int
    max_tokens: int | None
    ignore_eos: bool
    placement: Placement
    cache_salt: str
    output: Output


def read_parameters(fields: Fields, settings: Settings, vocab_size: int) -> Parameters:
    """Raises ``ClientError`` naming the field and its range."""
    refuse_unserved(fields)
    return Parameters(
        sampling=read_sampling(fields, settings, vocab_size),
        choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        max_tokens=read_max_tokens(fields),
        ignore_eos=fields.flag("ignore_eos", False),
        placement=read_placement(fields, settings),
        cache_salt=fields.text("cache_salt"),
        output=read_output(fields, vocab_size),
    )


def refuse_unserved(fields: Fields) -> None:
    for name in REFUSED:
        if fields.value(name) not in (None, 0, False, "", [], {}):
            raise ClientError(f"{name} is not supported by this server", param=name)
    if fields.integer("min_tokens", 0):
        raise ClientError("min_tokens is not supported by this server", param="min_tokens")
    kind = fields.nested("response_format").value("type")
    if kind not in (None, "text"):
        raise ClientError("response_format must be text: structured output is not supported by this server", param="response_format")


def read_sampling(fields: Fields, settings: Settings, vocab_size: int) -> Sampling:
    """Values that the client leaves out come from the settings; a seed that is absent or -1 is drawn here."""

    def number(name: str, low: float, high: float, above: bool = False) -> float:
        value = fields.number(name, low, high, above)
        return float(getattr(settings, name)) if value is None else value

    top_k = fields.integer("top_k", -1)
    seed = fields.integer("seed", -1)
    temperature = number("temperature", 0, 100)
    repetition = fields.number("repeat_penalty", 0, 100, above=True)
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=min(max(settings.top_k if top_k is None else top_k, 0), vocab_size),
        top_p=number("top_p", 0, 1),
        min_p=number("min_p", 0, 1),
        presence_penalty=number("presence_penalty", -2, 2),
        frequency_penalty=number("frequency_penalty", -2, 2),
        repetition_penalty=number("repetition_penalty", 0, 100, above=True)
        if repetition is None or fields.has("repetition_penalty") else repetition,
        logit_bias=read_logit_bias(fields, vocab_size),
        seed=secrets.randbits(SEED_BITS) if seed is None or seed < 0 else seed,
    )


def read_logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's object {"id": bias} or llama.cpp's list [[id, bias], ...]; sorted, so that order says nothing."""
    must = f"at most {MAX_BIASES} pairs of a token id below {vocab_size} and a number from -100 to 100"
    given = fields.value("logit_bias")
    pairs = list(given.items()) if isinstance(given, dict) else fields.items("logit_bias", MAX_BIASES)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise fields.error("logit_bias", must)
        key, bias = pair
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else as_integer(key)
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if token is None or not 0 <= token < vocab_size or not is_number or len(biases) >= MAX_BIASES:
            raise fields.error("logit_bias", must)
        biases[token] = float(bias)
    return tuple(sorted(biases.items()))


def read_max_tokens(fields: Fields) -> int | None:
    """``max_completion_tokens`` wins over ``max_tokens`` over ``n_predict``; -1 is what llama.cpp's users write for no limit."""
    values = [fields.integer(name, -1) for name in ("max_completion_tokens", "max_tokens", "n_predict")]
    given = next((value for value in values if value is not None), None)
    return None if given == -1 else given


def read_stop_tokens(fields: Fields, vocab_size: int) -> frozenset[int]:
    tokens = [as_integer(value) for value in fields.items("stop_token_ids", MAX_STOP_TOKENS)]
    if any(token is None or not 0 <= token < vocab_size for token in tokens):
        raise fields.error("stop_token_ids", f"a list of at most {MAX_STOP_TOKENS} token ids below {vocab_size}")
    return frozenset(token for token in tokens if token is not None)


def read_placement(fields: Fields, settings: Settings) -> Placement:
    slot = fields.integer("id_slot", -1, settings.batch - 1)
    session = fields.text("session_id")
    if session and slot is not None and slot >= 0:
        raise ClientError("id_slot belongs to one host and cannot go with a session id", param="id_slot")
    return Placement(
        slot=None if slot is None or slot < 0 else slot,
        key=session or fields.text("prompt_cache_key"),
        reuse=fields.flag("cache_prompt", True),
        keep=fields.flag("strata_checkpoint", True),
    )


def read_output(fields: Fields, vocab_size: int) -> Output:
    options = fields.nested("stream_options")
    stream = fields.flag("stream", False)
    return Output(
        stream=stream,
        include_usage=stream and options.flag("include_usage", False),
        continuous_usage=stream and options.flag("continuous_usage_stats", False),
        progress=stream and fields.flag("return_progress", False),
        stops=read_stops(fields),
        stop_token_ids=read_stop_tokens(fields, vocab_size),
        include_stop=fields.flag("include_stop_str_in_output", False),
        keep_special=not fields.flag("skip_special_tokens", True),
        token_ids=fields.flag("return_token_ids", False),
    )


def read_stops(fields: Fields) -> tuple[str, ...]:
    given = fields.value("stop")
    stops = [given] if isinstance(given, str) else fields.items("stop", MAX_STOPS)
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise fields.error("stop", f"a string or a list of at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stop for stop in stops if isinstance(stop, str))


def with_session(fields: Fields, header: str) -> Fields:
    """The X-Session-ID header counts as the body's ``session_id`` and wins over it."""
    return fields.also("session_id", header) if header else fields


def with_logprobs(parameters: Parameters, logprobs: int) -> Parameters:
    return replace(
        parameters,
        sampling=replace(parameters.sampling, logprobs=logprobs),
        output=replace(parameters.output, logprobs=logprobs),
    )
