"""Policy of structural tags."""

from typing import Any

import pytest

from dynamo.frontend.structural_tag_policy import (
    effective_tool_strict,
    runtime_structural_tag_excludes_reasoning,
    runtime_structural_tag_options,
    should_attempt_structural_tag,
)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (None, ("off", "auto", "auto")),
        ({}, ("off", "auto", "auto")),
        ({"structural_tag_mode": "on", "structural_tag_schema": "strict"}, ("on", "auto", "strict")),
        ({"structural_tag": {"scope": "always"}, "structural_tag_mode": "off"}, ("on", "always", "auto")),
        ({"structural_tag": None, "structural_tag_mode": "on"}, ("off", "auto", "auto")),
    ],
)
def test_structural_tag_object_takes_precedence_over_the_deprecated_fields(
    config: Any, options: tuple[str, str, str]
) -> None:
    assert runtime_structural_tag_options(config) == options


@pytest.mark.parametrize(
    ("boundary", "engine_excludes", "excluded"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("backend", False, True),
        ("structural_tag", False, False),
        ("structural_tag", True, True),
    ],
)
def test_engine_decides_on_reasoning_unless_the_policy_does(
    boundary: str, engine_excludes: bool, excluded: bool
) -> None:
    data = {"tool_call_structural_tag_excludes_reasoning": engine_excludes}
    config = {"structural_tag": {"reasoning_boundary": boundary}, "runtime_data": data}
    assert runtime_structural_tag_excludes_reasoning(config) is excluded
    assert not runtime_structural_tag_excludes_reasoning(None)


@pytest.mark.parametrize(
    ("changes", "attempted"),
    [
        ({}, False),
        ({"scope": "always"}, True),
        ({"any_explicit_strict": True}, True),
        ({"parallel_tool_calls_explicitly_false": True}, True),
        ({"tool_choice_kind": "required"}, True),
        ({"tool_choice_kind": "other", "scope": "always"}, False),
        ({"mode": "off", "scope": "always"}, False),
        ({"has_tools": False, "scope": "always"}, False),
    ],
)
def test_structural_tag_policy_selects_requests(changes: dict[str, Any], attempted: bool) -> None:
    request: dict[str, Any] = {
        "mode": "on",
        "scope": "auto",
        "tool_choice_kind": "auto",
        "has_tools": True,
        "any_explicit_strict": False,
        "parallel_tool_calls_explicitly_false": False,
    }
    assert should_attempt_structural_tag(**(request | changes)) is attempted


def test_only_an_explicit_false_relaxes_a_tool() -> None:
    assert effective_tool_strict(None, "auto")
    assert effective_tool_strict(True, "auto")
    assert not effective_tool_strict(False, "auto")
    assert effective_tool_strict(False, "strict")
