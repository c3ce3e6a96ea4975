"""Any JSON: values of every shape, and those that mean something to an API more often than chance would have it."""

from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

WORDS = (
    "user", "assistant", "system", "developer", "tool", "message", "text", "input_text", "output_text", "input_image",
    "image", "document", "refusal", "reasoning", "function", "function_call", "function_call_output", "item_reference",
    "thinking", "tool_use", "tool_result", "auto", "none", "any", "required", "allowed_tools", "json_object",
    "json_schema", "enabled", "disabled", "adaptive", "base64", "url", "custom", "x",
)  # fmt: skip
NAMES = (
    "type", "role", "content", "text", "name", "id", "call_id", "arguments", "output", "summary", "tools", "mode",
    "parameters", "input_schema", "input", "thinking", "signature", "source", "data", "media_type", "tool_use_id",
    "format", "schema", "effort", "budget_tokens", "url", "image_url", "edits", "cache_control",
)  # fmt: skip


def values() -> st.SearchStrategy[Json]:
    """Anything."""
    leaves = st.none() | st.booleans() | st.integers(-3, 3000) | st.floats(-3, 3) | st.sampled_from(WORDS)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
        max_leaves=12,
    )


def bodies(fields: Sequence[str], **given: Json) -> st.SearchStrategy[bytes]:
    """Return bodies with a random subset of these fields, in addition to the given ones."""
    more = st.dictionaries(st.sampled_from(fields), values(), max_size=4)
    return more.map(lambda body: msgspec.json.encode({**given, **body}))
