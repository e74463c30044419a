"""Where a chat template runs: a program from a model file, written by a stranger, over text from another stranger.

Nothing is reached (E1): Jinja2's immutable sandbox, and of built-in types only the methods of a short list, of filters and
globals only harmless ones. Nothing explodes: everything that can grow is charged to the ``Meter`` of the rendering:

- each turn of a loop and each call of a macro or function, with the literal text in its body (nested loops, recursion);
- each ``+ * ** % ~``, slice, list or dict made, by the size of its result, the multiplying ones in advance;
- each value written out, also inside macros and ``set`` blocks, and each filter and test.

Numbers that set a size (``indent``, precision, widths) are capped, integers have at most 4,096 bits. What remains: one
operation on values that are within the allowance (comparing two long lists) is not interrupted.

The dialect is that of the models' authors: ``trim_blocks``, ``lstrip_blocks``, ``break`` and ``continue``, ``{% generation %}``,
``raise_exception``, ``strftime_now``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Joiner, Namespace

from strata.text.filters import charge_size, join, make_filters, make_tests, replace
from strata.text.instrument import Instrument
from strata.text.meter import METER

_MAX_BITS = 4096
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric"
        " isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition"
        " rsplit rstrip split splitlines startswith strip swapcase title upper".split()
    ),
    dict: frozenset("get items keys values copy".split()),
    list: frozenset("index count copy".split()),
    tuple: frozenset("index count".split()),
    **dict.fromkeys((int, float, bool, bytes, set, frozenset, range, type), frozenset()),
}


class Refusal(jinja2.TemplateError):
    """The template's own words about a conversation that it does not take (``raise_exception``)."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. ``now``: the clock of ``strftime_now``. Rendering needs a ``Meter`` in ``METER``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would run expressions at load, outside any meter
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=_finalize,
            cache_size=0,
        )
        self.filters = make_filters()
        self.tests = cast(Any, make_tests())
        self.globals = {
            "range": safe_range,
            "dict": lambda *args, **kwargs: _made(dict(*args, **kwargs)),
            "namespace": _Namespace,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }

    def load(self, source: str) -> jinja2.Template:
        """The template, with its loops and its makings under the meter. Raises whatever Jinja2 or Python raise for bad sources."""
        return self.from_string(cast(nodes.Template, Instrument().visit(self.parse(source))))

    # what `Instrument` calls from the template's code

    def meter_tick(self, literal: int) -> bool:
        METER.get().charge(literal)
        return True

    def meter_concat(self, *values: object) -> str:
        for value in values:
            METER.get().weigh(value)
        return "".join(map(str, values))

    def meter_cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        result = value[start:stop:step]
        METER.get().charge(len(result))
        return result

    def meter_made(self, value: Any) -> Any:
        return _made(value)

    # what Jinja2 calls

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind in type(obj).__mro__:
            if kind in _METHODS:
                return attr in _METHODS[kind]
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        if ":" in text or "!" in text:
            raise SecurityError("'.format' with a format specification is not allowed here")

        def checked(*args: Any, **kwargs: Any) -> str:
            for _ in range(text.count("{")):
                METER.get().weigh((args, kwargs))
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        target, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        METER.get().charge(len(target) if isinstance(target, str) else 1)
        if isinstance(target, str) and name == "join":
            return join(args[0], target) if len(args) == 1 else target.join(*args)
        if isinstance(target, str) and name == "replace":
            return replace(target, *args)
        result = super().call(__context, __obj, *args, **kwargs)
        charge_size(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = METER.get()
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "*" and numbers:
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * (int(right) if numbers and abs(right) < _MAX_BITS else _MAX_BITS))
        elif operator == "*":
            times, thing = (left, right) if isinstance(left, int) else (right, left)
            meter.charge(len(thing) * max(int(times), 0))
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with '%' is not allowed here")
        elif operator == "+" and not numbers:
            meter.charge(len(left) + len(right) if hasattr(left, "__len__") and hasattr(right, "__len__") else 1)
        return super().call_binop(context, operator, left, right)


class GenerationTag(Extension):
    """``{% generation %}`` marks, for training, what the assistant wrote; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Written out it would show what it holds, which may hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _bits(value: float) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise SecurityError("numbers of more than 4096 bits are not allowed here")


def _made(value: Any) -> Any:
    METER.get().weigh(value)
    return value


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    METER.get().weigh(value)
    return value


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))
