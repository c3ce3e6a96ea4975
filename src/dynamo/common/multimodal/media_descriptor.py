"""The content hash of media that a frontend decoded."""

import re
from typing import Any, Final

CONTENT_HASH_KEY: Final = "content_hash"


def decoded_content_hash_key(metadata: Any) -> str | None:
    """Return the hash, 16 hexadecimal digits; None if the metadata has none."""
    key = metadata.get(CONTENT_HASH_KEY) if isinstance(metadata, dict) else None
    return key if isinstance(key, str) and re.fullmatch("[0-9a-f]{16}", key) else None
