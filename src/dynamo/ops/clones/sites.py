"""Sites of copies: facts about one copy in a source file, the bucket it probably belongs to, and its rank. Pure."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

SNIPPET_MAX = 96


class Bucket(enum.Enum):
    """What a copy probably is; the first three are left alone."""

    SHARED = "required shared ownership"
    ASYNC = "required async/task/retry ownership"
    COLD = "cheap or cold"
    BORROW = "removable borrow"
    MOVE = "removable move"
    API = "API change"


ACTIONABLE = frozenset({Bucket.BORROW, Bucket.MOVE, Bucket.API})
HINTS = {
    Bucket.SHARED: "a shared handle; the copy is a reference count",
    Bucket.ASYNC: "the value crosses a task; keep it without an ownership proof",
    Bucket.COLD: "rarely executed, or as cheap as a copy",
    Bucket.BORROW: "pass a reference, a slice or an iterator to the callee",
    Bucket.MOVE: "the value is not used afterwards: move it",
    Bucket.API: "share with Arc<[T]>, or change the signature to accept a reference",
}
PYTHON_HINTS = {
    **HINTS,
    Bucket.SHARED: "a reference; nothing is copied",
    Bucket.API: "share one immutable value, or let the callee accept the parts that differ",
}
WEIGHTS = {Bucket.SHARED: 0, Bucket.ASYNC: 0, Bucket.COLD: -20, Bucket.BORROW: 15, Bucket.MOVE: 20, Bucket.API: 10}
AREAS = (
    (
        "request path",
        40,
        (
            "lib/llm/src/backend", "lib/llm/src/preprocessor", "lib/llm/src/http", "lib/llm/src/grpc", "lib/llm/src/protocols",
            "lib/llm/src/migration", "src/dynamo/serving", "src/dynamo/text", "src/dynamo/http", "src/dynamo/api",
            "src/dynamo/backend",
        ),
    ),
    (
        "routing",
        30,
        (
            "lib/kv-router/src/scheduling", "lib/kv-router/src/sequences", "lib/kv-router/src/indexer", "lib/kv-router/src",
            "lib/llm/src/kv_router", "src/dynamo/kv_router", "src/dynamo/routing",
        ),
    ),
    (
        "block manager",
        20,
        (
            "lib/llm/src/block_manager", "lib/bindings/kvbm/src/block_manager", "lib/kvbm-engine/src/offload", "src/dynamo/kvbm",
            "src/dynamo/tokens",
        ),
    ),
    (
        "runtime",
        10,
        (
            "lib/runtime/src/component", "lib/runtime/src/pipeline", "lib/runtime/src/transports", "src/dynamo/runtime",
            "src/dynamo/kv_events",
        ),
    ),
)  # fmt: skip
"""Areas by priority: name, weight, and the beginnings of their paths."""
OTHER = "other"
LOOP, ASYNC_FUNCTION, HOT_NAME, CONVERSION = 20, 5, 10, 10
HOT_NAMES = (
    "poll", "next", "process", "route", "schedul", "select", "generate", "dispatch", "decode", "encode", "send", "recv", "handle",
    "on_", "apply", "find", "match", "push", "step", "forward",
)  # fmt: skip
COLD_NAMES = (
    "new",
    "default",
    "build",
    "init",
    "from_env",
    "fmt",
    "main",
    "__init__",
    "__repr__",
    "__str__",
    "__post_init__",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneSite:
    """One copy."""

    path: str
    line: int
    snippet: str
    kind: str
    """The method or function that copies."""
    bucket: Bucket
    function: str = ""
    is_in_loop: bool = False
    is_async: bool = False
    is_test: bool = False

    @property
    def area(self) -> str:
        """Return the area of the file."""
        return area_of(self.path)[0]

    @property
    def score(self) -> int:
        """Return how likely the copy is hot and removable; higher is sooner."""
        name = self.function.lower()
        return max(
            0,
            area_of(self.path)[1]
            + WEIGHTS[self.bucket]
            + LOOP * self.is_in_loop
            + ASYNC_FUNCTION * self.is_async
            + HOT_NAME * any(word in name for word in HOT_NAMES)
            - CONVERSION * (self.kind in {"to_string", "to_owned"})
            - 20 * (name in COLD_NAMES),
        )


def area_of(path: str) -> tuple[str, int]:
    """Return the area of a path and its weight."""
    text = f"/{path.replace(chr(92), '/')}"
    for name, weight, beginnings in AREAS:
        if any(f"/{beginning}" in text for beginning in beginnings):
            return name, weight
    return OTHER, 0


def ranked(
    sites: Iterable[CloneSite], *, only_actionable: bool = False, include_tests: bool = False
) -> list[CloneSite]:
    """Return the sites in the order of their scores; those of tests are left out unless they are wanted."""
    kept = [
        one for one in sites if (include_tests or not one.is_test) and (not only_actionable or one.bucket in ACTIONABLE)
    ]
    return sorted(kept, key=lambda one: (-one.score, one.path, one.line))


def shortened(text: str) -> str:
    """Return a snippet on one line."""
    line = " ".join(text.split())
    return line if len(line) <= SNIPPET_MAX else f"{line[: SNIPPET_MAX - 1]}…"
