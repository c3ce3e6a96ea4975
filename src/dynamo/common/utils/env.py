"""Booleans in environment variables."""

from dynamo.core.config import environ

TRUE = frozenset({"true", "1", "yes"})


def env_bool(name: str, *, default: bool = False) -> bool:
    """Return whether a variable is true; the default if it is unset or empty."""
    text = environ().get(name)
    return text.lower() in TRUE if text else default
