"""Arguments of `LLM` on the command line."""

from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.trtllm.dynamic_flags import infer_type, parse_dynamic_flags, set_nested, split_dynamic_flags


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-0.5", -0.5),
        ("1e3", 1000.0),
        ("TRUE", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("yes", "yes"),
        ("/path", "/path"),
        ('{"a": [1]}', {"a": [1]}),
        ("[1, 2]", [1, 2]),
        ("[x", "[x"),
    ],
)
def test_value_type_is_inferred(text: str, value: Any) -> None:
    assert infer_type(text) == value
    assert type(infer_type(text)) is type(value)


def test_dotted_flags_are_nested_and_other_arguments_are_kept() -> None:
    words = ["--model", "m", "--trtllm.kv.fraction", "0.7", "--trtllm.My-Key.Sub=false", "--trtllm.kv.reuse", "true"]
    assert split_dynamic_flags(words) == (
        ["--model", "m"],
        {"kv": {"fraction": 0.7, "reuse": True}, "My-Key": {"Sub": False}},
    )


def test_scalar_value_cannot_have_nested_fields() -> None:
    nested: dict[str, Any] = {"a": 1}
    with pytest.raises(ConfigError, match="a is 1"):
        set_nested(nested, ["a", "b"], 2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--trtllm.a"], "--trtllm.a: must have a value"),
        (["--trtllm.a", "--trtllm.b", "1"], "--trtllm.a: must have a value"),
        (["--trtllm..a", "1"], "--trtllm..a: must be --trtllm.<dotted.name>"),
        (["--trtllm.a", "1", "--trtllm.a.b", "2"], "--trtllm.a.b: a is 1"),
        (["--other", "1"], "unrecognized argument --other"),
    ],
)
def test_invalid_command_line_exits_with_one_line(
    words: list[str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="1"):
        parse_dynamic_flags(words)
    assert named in caplog.text
