"""Costs in added lines, and where they do not matter."""

import pytest

from dynamo.ops.reviews.diff import AddedLine
from dynamo.ops.reviews.perf_patterns import Impact, findings, overall

HOT, COLD = "src/dynamo/serving/x.py", "src/dynamo/ops/x.py"


def line(text: str, *before: str, path: str = HOT) -> AddedLine:
    return AddedLine(path, 7, text, before)


ASYNC, LOOP = "async def f(self):", "    for a in b:"


@pytest.mark.parametrize(
    ("added", "concern", "impact"),
    [
        (line("    time.sleep(1)", ASYNC), "async blocking", Impact.SIGNIFICANT),
        (line("    with self._lock:", ASYNC), "lock", Impact.SIGNIFICANT),
        (line("    x = copy.deepcopy(y)", "def f():"), "copy", Impact.MODERATE),
        (line("    x = copy.deepcopy(y)", "def f():", path=COLD), "copy", Impact.MINOR),
        (line("        g(list(a))", "def f():", LOOP), "copy", Impact.MINOR),
        (line("    json.dumps(x)", "def f():"), "serialization", Impact.MODERATE),
        (line("    re.compile(x)", "def f():"), "allocation", Impact.MINOR),
        (line("    q = asyncio.Queue()", "def f():"), "memory", Impact.MODERATE),
        (
            line("    let a = x.lock().unwrap();", "async fn f() {", path="lib/llm/src/backend.rs"),
            "lock",
            Impact.MODERATE,
        ),
        (
            line("        g(a.clone());", "fn f() {", "    for a in b {", path="lib/llm/src/backend.rs"),
            "copy",
            Impact.MINOR,
        ),
    ],
)
def test_performance_pattern_is_reported_in_its_context(added: AddedLine, concern: str, impact: Impact) -> None:
    (found,) = findings([added])
    assert (found.concern, found.impact, found.line) == (concern, impact, 7)


@pytest.mark.parametrize(
    "added",
    [
        line("    time.sleep(1)", "def f():"),
        line("    # time.sleep(1)", ASYNC),
        line("    time.sleep(1)", ASYNC, path="tests/unit/test_x.py"),
        line("x = re.compile(y)"),
        line("    json.dumps(x)", "def f():", path=COLD),
        line("    g(list(a))", "def f():"),
    ],
)
def test_line_without_cost_is_no_finding(added: AddedLine) -> None:
    assert findings([added]) == []


def test_overall_impact_is_the_largest() -> None:
    assert overall([]) is Impact.NEGLIGIBLE
    found = findings([line("    json.dumps(x)", "def f():"), line("    time.sleep(1)", ASYNC)])
    assert found[0].concern == "async blocking"
    assert overall(found) is Impact.SIGNIFICANT
