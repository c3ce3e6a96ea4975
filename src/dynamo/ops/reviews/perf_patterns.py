"""Patterns of costs in added lines of Python and Rust: copies, blocking calls, locks, serialization, allocations, memory. Pure."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.ops.clones.sites import OTHER, area_of
from dynamo.ops.reviews.diff import AddedLine

COMMENT = re.compile(r"^\s*(?:#|//|/\*|\*|\"\"\")")
ASYNC = re.compile(r"\basync\s+(?:def|fn|move)\b|\btokio::spawn\b")
FUNCTION = re.compile(r"\b(?:def|fn)\s+\w+")
LOOP = re.compile(r"^(?:async\s+)?(?:for|while|loop)\b|\bfor\b.+\bin\b.*:$")
TESTS = re.compile(r"(?:^|/)(?:tests?|benches|benchmarks|examples|docs)/|(?:^|/)test_[^/]*$|_test\.rs$")


class Impact(enum.Enum):
    """Impact on performance, in ascending order."""

    NEGLIGIBLE = "negligible"
    MINOR = "minor"
    MODERATE = "moderate"
    SIGNIFICANT = "significant"


@dataclass(frozen=True, slots=True)
class CostPattern:
    """One pattern, and where it matters."""

    concern: str
    suffix: str
    expression: "re.Pattern[str]"
    why: str
    fix: str
    impact: Impact
    """Impact on a hot path; elsewhere one step less."""
    needs_async: bool = False
    needs_loop: bool = False
    needs_function: bool = False
    only_hot: bool = True


def _pattern(concern: str, suffix: str, text: str, why: str, fix: str, impact: Impact, **where: bool) -> CostPattern:
    return CostPattern(concern, suffix, re.compile(text), why, fix, impact, **where)


S, M, m = Impact.SIGNIFICANT, Impact.MODERATE, Impact.MINOR
PATTERNS = (
    _pattern("async blocking", ".py", r"\btime\.sleep\(", "the event loop serves no other request meanwhile", "await asyncio.sleep", S, needs_async=True, only_hot=False),
    _pattern("async blocking", ".py", r"\b(?:requests\.(?:get|post|put)|urllib\.request\.urlopen|subprocess\.(?:run|check_output))\(", "the event loop waits for I/O", "use an asynchronous client, or asyncio.to_thread", S, needs_async=True, only_hot=False),
    _pattern("async blocking", ".py", r"(?<![\w.])open\(|\.(?:read_text|read_bytes|write_text|write_bytes)\(", "a file on a slow disk blocks the event loop", "asyncio.to_thread", M, needs_async=True, only_hot=False),
    _pattern("lock", ".py", r"^\s*with\s+[\w.]*lock\b", "a blocking lock in a coroutine blocks the event loop", "asyncio.Lock, or no await and no I/O inside", S, needs_async=True, only_hot=False),
    _pattern("lock", ".py", r"\basync with\s+[\w.]*lock\b", "the lock is held across awaits, so requests wait for each other", "hold it only for the change of state", M),
    _pattern("copy", ".py", r"\b(?:copy\.)?deepcopy\(", "copies every nested object of each request", "copy the changed level only, or share a frozen object", M, only_hot=False),
    _pattern("copy", ".py", r"(?<![\w.])(?:list|dict|set|tuple|bytes)\([\w.]+\)", "copies the container in each iteration", "iterate over the original, or copy once before the loop", m, needs_loop=True),
    _pattern("serialization", ".py", r"\bjson\.(?:dumps|loads)\(", "the standard library's JSON is several times slower than msgspec", "a typed msgspec encoder, made once", M),
    _pattern("serialization", ".py", r"\bpickle\.(?:dumps|loads)\(", "slow, and unsafe with data of others", "msgspec", M, only_hot=False),
    _pattern("allocation", ".py", r"^\s*\w+\s*\+=\s*(?:f?[\"']|str\()", "a string that grows in a loop is copied each time", "collect the parts and join them", m, needs_loop=True),
    _pattern("allocation", ".py", r"(?<!\w)re\.(?:compile|match|search|sub|findall|fullmatch)\(", "the expression is looked up or compiled at each call", "compile it once at module level", m, needs_function=True),
    _pattern("gil", ".py", r"\bthreading\.Thread\(", "a thread for each request competes for the interpreter lock", "a pool made once, or a process", M),
    _pattern("memory", ".py", r"lru_cache\(\s*(?:maxsize\s*=\s*)?None|@(?:functools\.)?cache\b", "the cache grows with each new argument", "set maxsize", M),
    _pattern("memory", ".py", r"asyncio\.Queue\(\s*\)", "an unbounded queue grows without limit under load", "set maxsize", M, only_hot=False),
    _pattern("task", ".py", r"\basyncio\.(?:create_task|ensure_future)\(", "a task for each item costs scheduling, and needs an owner", "one task for a batch; keep a reference", m, needs_loop=True),
    _pattern("logging", ".py", r"\blog(?:ger)?\.\w+\(f[\"']", "the text is formatted even if the level is off", "pass the values as arguments", m),
    _pattern("async blocking", ".rs", r"\b(?:std::)?thread::sleep\(", "blocks a worker thread of the runtime", "tokio::time::sleep", S, needs_async=True, only_hot=False),
    _pattern("async blocking", ".rs", r"\bblock_on\(", "blocks a worker thread of the runtime", "await", S, needs_async=True, only_hot=False),
    _pattern("lock", ".rs", r"\.(?:lock|read|write)\(\)\.(?:unwrap|expect)", "a guard that lives across an await stops other tasks", "end the guard's scope before the await", M, needs_async=True),
    _pattern("copy", ".rs", r"\.clone\(\)", "copies the value in each iteration, unless it is a shared handle", "borrow, move, or share with Arc", m, needs_loop=True),
    _pattern("copy", ".rs", r"\.to_vec\(\)", "copies the whole slice", "pass the slice, or share with Arc<[T]>", m),
    _pattern("serialization", ".rs", r"\bserde_json::(?:to_string|to_vec|to_value|from_str|from_value)\(", "JSON for each event or request", "encode once, or use a binary format", M),
    _pattern("allocation", ".rs", r"\bformat!\(|\.to_string\(\)", "allocates a string in each iteration", "write into a reused buffer", m, needs_loop=True),
    _pattern("allocation", ".rs", r"\bRegex::new\(", "compiles the expression at each call", "LazyLock", M, needs_function=True, only_hot=False),
    _pattern("memory", ".rs", r"\bunbounded_channel\b|\bunbounded\(\)", "grows without limit under load", "a bounded channel", M, only_hot=False),
)  # fmt: skip
CHECKS = ("async blocking", "lock", "copy", "serialization", "allocation", "gil", "memory", "task", "logging")
"""Concerns in the order of the checklist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfFinding:
    """One cost in an added line."""

    path: str
    line: int
    concern: str
    why: str
    fix: str
    impact: Impact
    text: str
    area: str


def findings(lines: Sequence[AddedLine]) -> list[PerfFinding]:
    """Return the costs in added lines, the largest first; tests and documentation are left out."""
    found = [
        finding
        for line in lines
        if not TESTS.search(line.path) and not COMMENT.match(line.text)
        for finding in _of_line(line)
    ]
    order = list(Impact)
    return sorted(found, key=lambda one: (-order.index(one.impact), one.path, one.line))


def _of_line(line: AddedLine) -> list[PerfFinding]:
    area, _ = area_of(line.path)
    enclosing = list(line.enclosing)
    function = next((one for one in enclosing if FUNCTION.search(one)), "")
    is_async = bool(ASYNC.search(function)) or any("tokio::spawn" in one or "async move" in one for one in enclosing)
    in_loop = any(LOOP.search(one) for one in enclosing[: enclosing.index(function)] if function) if function else False
    found = []
    for pattern in PATTERNS:
        if (
            not line.path.endswith(pattern.suffix)
            or not pattern.expression.search(line.text)
            or (pattern.needs_async and not is_async)
            or (pattern.needs_loop and not in_loop)
            or (pattern.needs_function and not function)
            or (pattern.only_hot and area == OTHER)
        ):
            continue
        impact = pattern.impact if area != OTHER else list(Impact)[max(0, list(Impact).index(pattern.impact) - 1)]
        found.append(
            PerfFinding(
                path=line.path,
                line=line.number,
                concern=pattern.concern,
                why=pattern.why,
                fix=pattern.fix,
                impact=impact,
                text=" ".join(line.text.split()),
                area=area,
            )
        )
    return found


def overall(found: Sequence[PerfFinding]) -> Impact:
    """Return the largest impact."""
    order = list(Impact)
    return max((one.impact for one in found), key=order.index, default=Impact.NEGLIGIBLE)
