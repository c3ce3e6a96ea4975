"""Agent context of a request."""

from collections.abc import Mapping
from typing import Any


def agent_context_from_request(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the request's `agent_context`; None if it is absent or no object."""
    context = request.get("agent_context")
    return context if isinstance(context, Mapping) else None


def session_id_from_request(request: Mapping[str, Any]) -> str | None:
    """Return the session id of the request's agent context; None if it is absent or blank."""
    session_id = (agent_context_from_request(request) or {}).get("session_id")
    return (session_id.strip() or None) if isinstance(session_id, str) else None
