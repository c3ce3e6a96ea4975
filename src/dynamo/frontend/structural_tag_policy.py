"""Policy of structural tags for tool calls, from a model card's runtime configuration. Pure.

For chat processors that prepare requests themselves; the frontend's own preprocessor uses `dynamo.model_card`.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal

logger = logging.getLogger(__name__)

ToolChoiceKind = Literal["none", "auto", "required", "named", "other"]
TOOL_CALL_STRUCTURAL_TAG_EXCLUDES_REASONING_RUNTIME_KEY = "tool_call_structural_tag_excludes_reasoning"
"""Field of a worker's runtime data: its engine constrains only the text after the reasoning."""
OFF = ("off", "auto", "auto")


def runtime_structural_tag_options(runtime_config: Any) -> tuple[str, str, str]:
    """Return mode, scope and schema. The field `structural_tag` has precedence over the former three fields."""
    if not isinstance(runtime_config, Mapping):
        return OFF
    if "structural_tag" in runtime_config:
        policy = runtime_config["structural_tag"]
        if not isinstance(policy, Mapping):
            return OFF
        return "on", policy.get("scope", "auto"), policy.get("schema", "auto")
    mode, scope, schema = (
        runtime_config.get(f"structural_tag_{name}", default)
        for name, default in zip(("mode", "scope", "schema"), OFF, strict=True)
    )
    return mode, scope, schema


def runtime_structural_tag_excludes_reasoning(runtime_config: Any) -> bool:
    """Return whether a tag must not model the reasoning, because the engine leaves it unconstrained."""
    if not isinstance(runtime_config, Mapping):
        return False
    data, policy = runtime_config.get("runtime_data"), runtime_config.get("structural_tag")
    key = TOOL_CALL_STRUCTURAL_TAG_EXCLUDES_REASONING_RUNTIME_KEY
    engine_excludes = isinstance(data, Mapping) and data.get(key) is True
    boundary = policy.get("reasoning_boundary", "auto") if isinstance(policy, Mapping) else "auto"
    if boundary == "structural_tag" and engine_excludes:
        logger.warning(
            "structural_tag.reasoning_boundary=structural_tag is not possible with this engine: using backend"
        )
    return boundary == "backend" or engine_excludes


def should_attempt_structural_tag(
    *,
    mode: str,
    scope: str,
    tool_choice_kind: ToolChoiceKind,
    has_tools: bool,
    any_explicit_strict: bool,
    parallel_tool_calls_explicitly_false: bool,
) -> bool:
    """Return whether a request gets a structural tag."""
    if mode != "on" or not has_tools:
        return False
    if tool_choice_kind == "auto":
        return scope == "always" or any_explicit_strict or parallel_tool_calls_explicitly_false
    return tool_choice_kind in ("required", "named")


def effective_tool_strict(request_strict: bool | None, schema_mode: str) -> bool:
    """Return whether a tool's arguments must match its schema: unless `strict` is false and the mode is `auto`."""
    return schema_mode == "strict" or request_strict is not False
