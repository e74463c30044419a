"""A template from a stranger: nothing is reached, nothing explodes, and the authors' dialect works."""

from __future__ import annotations

from datetime import datetime

import pytest
from jinja2.exceptions import SecurityError, TemplateAssertionError, UndefinedError

from strata.text.meter import METER, Meter, RenderTooCostly
from strata.text.sandbox import Refusal, Sandbox

SANDBOX = Sandbox(lambda: datetime(2024, 2, 29, 13, 5))
SMALL = 200_000


def render(source: str, allowance: int = SMALL, seconds: float = 1e9, clock=lambda: 0.0, **variables) -> str:
    token = METER.set(Meter(allowance, seconds, clock))
    try:
        return SANDBOX.load(source).render(**variables)
    finally:
        METER.reset(token)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__'].mro() }}",
        "{{ ''|attr('__class__')|attr('mro')() }}",
        "{{ range.__init__.__globals__ }}",
        "{{ dict.fromkeys([1]) }}",
        "{{ (1).to_bytes(10**3, 'big') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ x.append(1) }}",
        "{{ d.update({'a': 1}) }}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({97: 'bbb'}) }}",
        "{{ 'a'.ljust(10) }}",
    ],
)
def test_nothing_is_reached(source: str) -> None:
    with pytest.raises((SecurityError, UndefinedError)):
        render(source, x=[1], d={})


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception.__globals__ }}", "{{ strftime_now.__closure__ }}", "{{ '{0.__class__}'.format(x) }}", "{{ x.__class__ }}"],
)
def test_what_is_hidden_is_written_as_nothing(source: str) -> None:
    assert render(source, x=[1]) == ""


@pytest.mark.parametrize("source", ["{{ lipsum() }}", "{{ environment.globals }}", "{% include 'x' %}", "{% import 'x' as y %}"])
def test_what_is_not_there(source: str) -> None:
    with pytest.raises((UndefinedError, TypeError)):
        render(source)


@pytest.mark.parametrize("name", ["center(9)", "wordwrap", "random", "pprint", "format(1)", "batch(2)", "xmlattr", "filesizeformat"])
def test_filters_that_chat_needs_not_are_refused_at_load(name: str) -> None:
    with pytest.raises(TemplateAssertionError, match="No filter named"):
        SANDBOX.load("{{ 'a'|" + name + " }}")


DOUBLING = "{% set ns = namespace(s='ab', l=['ab']) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"
EXPLOSIONS = {
    "multiplied text": "{{ ('a' * 10000000000)|length }}",
    "multiplied list": "{{ ([1] * 10000000000)|length }}",
    "multiplied from the left": "{{ (10000000000 * 'a')|length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of powers": "{% set ns = namespace(n=7) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubling by +": DOUBLING.replace("STEP", "ns.s + ns.s"),
    "doubling by ~": DOUBLING.replace("STEP", "ns.s ~ ns.s"),
    "doubling by join": DOUBLING.replace("STEP", "[ns.s, ns.s]|join('')"),
    "doubling by method join": DOUBLING.replace("STEP", "''.join([ns.s, ns.s])"),
    "doubling by replace": DOUBLING.replace("STEP", "ns.s|replace('a', ns.s)"),
    "doubling by method replace": DOUBLING.replace("STEP", "ns.s.replace('a', ns.s)"),
    "doubling by format": DOUBLING.replace("STEP", "'{}{}'.format(ns.s, ns.s)"),
    "doubling by tojson": DOUBLING.replace("STEP", "[ns.s, ns.s]|tojson"),
    "doubling by string": DOUBLING.replace("STEP", "[ns.s, ns.s]|string"),
    "a field named often": "{% set s = 'a' * 9999 %}{{ ('{0}' * 9999).format(s)|length }}",
    "copies kept": "{% set ns = namespace(l=[]) %}{% set t = 'a' * 9999 %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + t.split('x') %}{% endfor %}",
    "nested lists": DOUBLING.replace("STEP", "[ns.s, ns.s]"),
    "nested tuples": DOUBLING.replace("STEP", "(ns.s, ns.s)"),
    "nested dicts": DOUBLING.replace("STEP", "{'a': ns.s, 'b': ns.s}"),
    "nested dict calls": DOUBLING.replace("STEP", "dict(a=ns.s, b=ns.s)"),
    "doubling in a set block": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "doubling in a macro": "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='ab') %}"
    "{% for i in range(60) %}{% set ns.s = twice(ns.s) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that only look": "{% for i in range(99999) if i < 0 %}{% endfor %}" * 9,
    "literal text in loops": "{% set x %}{% for i in range(9999) %}" + "long " * 100 + "{% endfor %}{% endset %}",
    "recursion that branches": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "slices kept": "{% set ns = namespace(l=[]) %}{% set t = 'a' * 10000 %}"
    "{% for i in range(9999) %}{% set ns.l = ns.l + [t[1:]] %}{% endfor %}",
    "a call block": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% for i in range(99999) %}"
    "{% call f() %}0123456789{% endcall %}{% endfor %}",
    "wide indent": "{{ 'a'|indent(100000000) }}",
    "wide json": "{{ [1]|tojson(indent=100000000) }}",
    "precise rounding": "{{ 1.5|round(1000000000, 'ceil') }}",
    "formatting by %": "{{ '%1000000000d' % 1 }}",
    "formatting by a width": "{{ '{:>1000000000}'.format(1) }}",
    "map over a range": "{{ range(99999)|map('string')|list }}" * 9,
    "a long range": "{% for i in range(10000000000) %}{% endfor %}",
}


@pytest.mark.parametrize("source", EXPLOSIONS.values(), ids=EXPLOSIONS.keys())
def test_nothing_explodes(source: str) -> None:
    with pytest.raises((RenderTooCostly, SecurityError, OverflowError)):
        render(source)


def test_endless_recursion_is_an_error_like_any_other() -> None:
    with pytest.raises(RecursionError):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", allowance=10**9)


def test_time_is_bounded_too() -> None:
    now = iter(range(10**9))
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RenderTooCostly, match="takes too long"):
        render(source, allowance=10**12, seconds=50, clock=lambda: float(next(now)))
    assert next(now) < 60


def test_a_meter_counts_what_is_written_out() -> None:
    meter = Meter(100, 1.0, lambda: 0.0)
    meter.weigh(["abcde"] * 4)
    assert 100 - meter.left == 1 + 4 + 4 * (5 + 1)
    with pytest.raises(RenderTooCostly, match="too much text"):
        meter.weigh("x" * 100)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ {'b': '<é&\"', 'a': [1, None, true]}|tojson }}", '{"b": "<é&\\"", "a": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 2}|tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ {'a': 1}|tojson(separators=(',', ':')) }}", '{"a":1}'),
        ("{{ [{'n': 1}, {'n': 2}]|map(attribute='n')|tojson }}", "[1, 2]"),
        ("{{ strftime_now('%d %b %Y %H:%M') }}", "29 Feb 2024 13:05"),
        ("{{ ('<b>'|safe) + '<i>' }}", "<b><i>"),
        ("{{ ('<'|e) + '<' }}", "&lt;<"),
        ("{{ [{'a': 'x'}, {'a': 'y'}]|join(', ', attribute='a') }}", "x, y"),
        ("{{ 'a\nb'|indent(2) }}|{{ 'a\nb'|indent(2, true) }}", "a\n  b|  a\n  b"),
        ("{{ 'aXbX'|replace('X', '-') }}{{ 'aXbX'.replace('X', '-', 1) }}", "a-b-a-bX"),
        ("{{ 'a-b'.split('-')|last }}{{ ' x '.strip() }}{{ 'ab'[::-1] }}{{ 'abc'[1:] }}", "bxbabc"),
        ("{{ 1 ~ 'a' ~ none }}{{ '%s' }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 'ab' * 2 }}", "1aNone%s31024abab"),
        ("{{ '{}-{name}'.format(1, name='x') }}", "1-x"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ x is defined }}{{ 'a' is string }}{{ {} is mapping }}{{ (1.25)|round(1) }}{{ missing }}", "FalseTrueTrue1.2"),
        ("{% macro m(a, b='y') %}{{ a }}{{ b }}{% endmacro %}{{ m('x') }}", "xy"),
        ("{{ {'k': {'items': 3}}.k['items'] }}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "3a1"),
    ],
)
def test_the_dialect(source: str, wanted: str) -> None:
    assert render(source) == wanted


def test_the_templates_own_words() -> None:
    with pytest.raises(Refusal, match="^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")
