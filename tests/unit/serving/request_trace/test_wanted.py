"""Tracing is enabled by its variable or by a sink of the former ones."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.serving.request_trace.wanted import audit_sinks, is_trace_wanted


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"DYN_REQUEST_TRACE": "0", "DYN_REQUEST_TRACE_SINKS": "file"}, False),
        ({"DYN_REQUEST_TRACE": "1"}, True),
        ({"DYN_AUDIT_SINKS": " , "}, False),
        ({"DYN_AUDIT_SINKS": "stderr"}, True),
    ],
)
def test_trace_is_wanted_if_a_variable_enables_it(variables: dict[str, str], wanted: bool) -> None:
    assert is_trace_wanted(variables) is wanted


def test_audit_sinks_are_separated_by_commas() -> None:
    assert audit_sinks({"DYN_AUDIT_SINKS": "stderr, nats,"}) == ["stderr", "nats"]
    assert audit_sinks({}) == []


def test_trace_variable_without_a_truth_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="DYN_REQUEST_TRACE"):
        is_trace_wanted({"DYN_REQUEST_TRACE": "perhaps"})
