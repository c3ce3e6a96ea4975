"""Whether requests are traced, without the trace itself."""

from collections.abc import Mapping

from dynamo.core.config import read_bool, setting


def audit_sinks(variables: Mapping[str, str]) -> list[str]:
    """Return the sinks of `DYN_AUDIT_SINKS`."""
    return [word.strip() for word in variables.get("DYN_AUDIT_SINKS", "").split(",") if word.strip()]


def is_trace_wanted(variables: Mapping[str, str]) -> bool:
    """Return whether the variables enable tracing. Raise `ConfigError`."""
    return setting("DYN_REQUEST_TRACE", False, read_bool, variables) or bool(audit_sinks(variables))
