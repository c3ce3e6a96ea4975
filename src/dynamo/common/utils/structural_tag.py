"""Structural tags as JSON text."""

import json
from typing import Any


def serialize_structural_tag(structural_tag: Any) -> str | None:
    """Return JSON text for a structural tag given as a pydantic model, an object or text."""
    tag = structural_tag.model_dump() if hasattr(structural_tag, "model_dump") else structural_tag
    return tag if tag is None or isinstance(tag, str) else json.dumps(tag)
