"""Sealed text: text in a form that clients keep and send back unchanged. It is encoded, not encrypted."""

import base64


def sealed(prefix: str, text: str) -> str:
    """Return the text in sealed form; the prefix identifies what it is."""
    return prefix + base64.b64encode(text.encode()).decode()


def unsealed(prefix: str, value: str) -> str | None:
    """Return the text of a value that was sealed with this prefix, None for any other value."""
    if not value.startswith(prefix):
        return None
    try:
        return base64.b64decode(value.removeprefix(prefix), validate=True).decode()
    except ValueError:  # Neither base64 nor UTF-8.
        return None
