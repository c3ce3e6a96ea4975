"""A template can neither leave its sandbox nor run away in it."""

import gc
from datetime import datetime

import pytest
from jinja2 import TemplateError

from dynamo.text.chat_template.bounds import FULL, LONG, QUICK, Bounds, Budget, OverBudget, TemplateRefused, Unlisted
from dynamo.text.chat_template.sandbox import environment, may_be_local, rendered

SMALL = Budget(turns=10_000, chars=1 << 20, value_chars=1 << 16, seconds=10.0)
SMALL_LOCAL = Budget(turns=10_000, chars=1 << 20, value_chars=1 << 16, seconds=10.0, is_local=True)


def render(source: str, budget: Budget = FULL, **values: object) -> str:
    template = environment(datetime.now).from_string(source)
    bounds = Bounds(budget)
    return rendered(template, {**template.globals, **values}, bounds)


ROUND_AND_ROUND = "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = b %}{% endfor %}{% endfor %}"
DOUBLING = "{%% set ns = namespace(s=%s) %%}{%% for a in range(99) %%}{%% set ns.s = %s %%}{%% endfor %%}{{ ns.s }}"

EXCESSIVE = [
    ROUND_AND_ROUND,
    "{% for a in range(9999) %}{% for b in range(9999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
    "{{ 'x' * 99999999999 }}",
    "{{ 99999999999 * 'x' }}",
    "{{ [1] * 99999999999 }}",
    "{{ 9 ** 999 }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '%*d' % (99999999999, 1) }}",
    "{{ '%99999999999d' | format(1) }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 99999999999) }}",
    "{{ 'x'.ljust(99999999999) }}",
    "{{ 'x'.replace('x', 'y' * 9999999).replace('y', 'z' * 9999999) }}",
    "{{ ('x' * 9999) | replace('x', 'y' * 9999) }}",
    "{{ 'x' | center(99999999999) }}",
    "{{ 'x\\ny' | indent(99999999999) }}",
    DOUBLING % ("'x'", "ns.s + ns.s"),
    DOUBLING % ("'x'", "ns.s ~ ns.s"),
    DOUBLING % ("'x'", "[ns.s, ns.s]"),
    DOUBLING % ("'x'", "(ns.s, ns.s)"),
    DOUBLING % ("'x'", "{'a': ns.s, 'b': ns.s}"),
    DOUBLING % ("['x']", "ns.s + ns.s"),
    DOUBLING % ("'xy'", "[ns.s, ns.s] | join"),
    DOUBLING % ("'xy'", "ns.s.join(['a', 'b', 'c'])"),
    DOUBLING % ("3", "ns.s * ns.s"),
    "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = m(n.s) %}{% endfor %}",
    "{% macro fork(n) %}{% if n %}{{ fork(n - 1) }}{{ fork(n - 1) }}{% endif %}{% endmacro %}{{ fork(99) }}",
    "{% for a in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{{ range(99999) | list | tojson }}",
    "{{ range(99999) | map('string') | join }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
]
STOPPED = (TemplateRefused, OverBudget, RecursionError)


@pytest.mark.parametrize("source", EXCESSIVE)
@pytest.mark.parametrize("budget", [SMALL, SMALL_LOCAL], ids=["child", "local"])
def test_template_sandbox_stops_an_excessive_template(source: str, budget: Budget) -> None:
    with pytest.raises(STOPPED):
        render(source, budget)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' | indent(2) }}", "{{ 'x' | center(5) }}", "{{ 'x'.center(5) }}", "{{ 'x%03d' % 5 }}", "{{ '%s' | format(1) }}",
        "{{ '{}'.format(1) }}", "{{ [1] | batch(2) | list }}", "{{ [1] | slice(2) | list }}", "{{ [1] | sum }}", "{{ [2, 1] | sort }}",
        "{{ [{'a': 1}] | groupby('a') }}", "{{ lipsum(1) }}", "{{ 'x' | wordwrap }}", "{{ 1.5 | round(2) }}", "{{ dict(a=1) }}",
        "{{ [1] | tojson(indent=99) }}", "{{ [1] | tojson(separators=(', ' * 99, ':')) }}", "{% set f = 'x'.center %}{{ f(3) }}",
        "{{ ['x'] | map('center', 5) | list }}", "{{ 'x'['center'](5) }}", "{{ 'x' | attr('upper') }}", "{{ 7 .to_bytes(9) }}",
        "{% set ns = namespace() %}{% set ns.a = [ns] %}", "{{ cycler(1, 2).next() }}", "{{ 'x'.encode() }}",
    ],
)  # fmt: skip
def test_template_sandbox_local_budget_allows_listed_operations_only(source: str) -> None:
    with pytest.raises(Unlisted):
        render(source, QUICK)


@pytest.mark.parametrize("budget", [QUICK, LONG, FULL])
def test_template_sandbox_refuses_a_product_of_large_numbers(budget: Budget) -> None:
    with pytest.raises((TemplateRefused, OverBudget), match="more than 512 bits"):
        render("{% for a in range(40) %}{% set x = x * x %}{% endfor %}{{ x * x }}", budget, x=1 << 300)


def test_template_sandbox_counts_iterations_of_loops_without_length() -> None:
    assert render("{% for a in values | select('odd') %}{{ a }}{% endfor %}", values=range(6)) == "135"


@pytest.mark.parametrize("source", ["x" * 70_000, "{{ a == b }}" * 501, "{{ a in b }}" * 501])
def test_template_sandbox_does_not_compile_a_large_template_in_the_serving_process(source: str) -> None:
    assert not may_be_local(source)
    assert may_be_local(source[:1000])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for a in 'abc' %}{{ loop.index }}{{ a }}{{ ',' if not loop.last }}{% endfor %}", "1a,2b,3c"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for a in nothing %}{{ a }}{% else %}none{% endfor %}", "none"),
        ("{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}", "12"),
        ("{{ 'a' * 3 }} {{ [1] * 2 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 'x%03d' % 5 }} {{ 1.5 + 1 }}", "aaa [1, 1] 1024 3 x005 2.5"),
        ("{{ ['a', 'b'] | join('-') ~ ['ab'] | map('upper') | list ~ none ~ 1 ~ nothing }}", "a-b['AB']None1"),
        ("{% set x %}{{ 'a' }}b{% endset %}{{ x }}{% set y | upper %}c{% endset %}{{ y }}", "abC"),
        ("{% macro m(a) %}<{{ a }}>{{ caller() }}{% endmacro %}{% call m(1) %}in{% endcall %}", "<1>in"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{{ [1, x][0] }}{{ 'abc'[1:] }}{{ ((1, x), )[0][0] }}", "AB1bc1"),
        ("{{ 'aXa' | replace('X', '-') }}{{ {'b': 1, 'a': 2} | dictsort }}", "a-a[('a', 2), ('b', 1)]"),
        ("{{ range(3) | list }}{{ [3, 1] | sort }}{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2] | sum }}",
         "[0, 1, 2][1, 3][[1, 2], [3]]3"),
        ("{{ 'ab'.replace('a', 'c') ~ 'a'.ljust(3) ~ '{:>3}'.format(1) ~ '%s' | format('y') }}", "cba    1y"),
        ("{{ 'a' | center(5) }}|{{ 'a\nb' | indent(2) }}", "  a  |a\n  b"),
        ("{% set ns = namespace(a=1) %}{% set ns.b = 2 %}{{ ns.a + ns.b }}", "3"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{{ [1, {'é': '<'}] | tojson }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}",
         '[1, {"é": "<"}]{"a":2,"b":1}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ 'é' | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
    ],
)  # fmt: skip
def test_template_sandbox_bounds_do_not_change_results(source: str, expected: str) -> None:
    assert render(source) == expected


def test_template_sandbox_refuses_non_lists_like_jinja() -> None:
    with pytest.raises(TypeError, match="'NoneType' object is not iterable"):
        render("{% for a in none %}{% endfor %}")


@pytest.mark.parametrize(
    "source", ["{% set ns = namespace() %}{% set ns._x = 1 %}", "{{ ''.__class__.mro() }}", "{{ [].append(1) }}"]
)
def test_template_sandbox_cannot_be_escaped(source: str) -> None:
    with pytest.raises(TemplateError, match=r"unsafe|cannot store|not safely callable"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(1) }}",
        "{% macro m(a) %}{{ m(a - 1) if a else 'end' }}{% endmacro %}{{ m(2) }}",
        "{% macro a(n) %}{{ b(n) }}{% endmacro %}{% macro b(n) %}{{ a(n - 1) if n else 'end' }}{% endmacro %}{{ a(2) }}",
        "{% set ns = namespace(f=none) %}{% for a in [1, 2] %}{% set ns.f = a %}{% endfor %}{{ ns.f }}",
    ],
)
def test_rendering_leaves_nothing_to_the_garbage_collector(source: str) -> None:
    template = environment(datetime.now).from_string(source)
    gc.collect()
    assert rendered(template, dict(template.globals), Bounds(QUICK))
    assert gc.collect() == 0
