"""BaseModel of the media protocols: pydantic's, or one clear error."""

try:
    from pydantic import BaseModel, Field
except ImportError:
    raise ImportError("dynamo.common.protocols requires pydantic: pip install pydantic") from None

__all__ = ["BaseModel", "Field"]
