"""Hooks of schemathesis: most generated bodies name a served model and few other fields, so that requests succeed."""

import zlib
from typing import Any

import schemathesis

MODEL, EMBEDDER = "m", "e"
USER = [{"role": "user", "content": "hi"}]
GOOD = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": USER},
}
"""Fields that replace the generated ones in half of the bodies, so that the other fields are reached."""
OTHERS = ("input", "prompt", "query", "documents")
"""Required fields of the other routes."""
GONE = {"functions", "function_call"}
"""Deprecated by OpenAI: they get upstream's 501, which is not a failure."""


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if isinstance(case.body, dict):
        case.body = narrowed(case.body, case.operation.path)


def narrowed(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the body, mostly without the greater part of its invalid fields."""
    rng = zlib.crc32(repr(body).encode("utf-8", "replace"))
    kept = {name: value for name, value in body.items() if name not in GONE}
    served = EMBEDDER if path == "/v1/embeddings" else MODEL
    if isinstance(body.get("model"), str) and rng % 10 < 9:
        kept["model"] = served
    if rng % 4:
        needed = {"model", *GOOD.get(path, OTHERS)}
        optional = sorted(kept.keys() - needed)
        chosen = {optional[(rng >> shift) % len(optional)] for shift in (8, 16)} if optional else set()
        kept = {name: value for name, value in kept.items() if name in needed or name in chosen}
    return {**kept, "model": served, **GOOD[path]} if path in GOOD and rng >> 24 & 1 else kept
