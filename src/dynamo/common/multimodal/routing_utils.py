"""Routing of requests with media: hashes in the place of placeholder tokens."""

from typing import Any

MM_PAD_SHIFT_VALUE = 1_000_000
"""Above all token ids."""
MM_PAD_HASH_MASK = (1 << 30) - 1
HASH_DIGITS = 16


def pad_value_for_mm_hash(mm_hash: int) -> int:
    """Return the token id that represents a hash."""
    return MM_PAD_SHIFT_VALUE + (mm_hash & MM_PAD_HASH_MASK)


def build_mm_routing_info_from_features(mm_features: list[Any], prompt_token_ids: list[int]) -> dict[str, Any] | None:
    """Return the tokens by which a request is routed; None if no feature with a hash covers a token."""
    tokens = list(prompt_token_ids)
    is_changed = False
    for feature in mm_features or ():
        if feature.mm_hash is None:
            continue
        pad = pad_value_for_mm_hash(int(feature.mm_hash[:HASH_DIGITS], 16))
        position = feature.mm_position
        mask = getattr(position, "is_embed", None)
        if mask is not None and hasattr(mask, "tolist"):
            mask = mask.tolist()
        length = min(position.length, len(tokens) - position.offset)
        for index in range(length):
            if mask is None or (index < len(mask) and mask[index]):
                tokens[position.offset + index] = pad
                is_changed = True
    if not is_changed:
        return None
    return {"routing_token_ids": tokens, "block_mm_infos": [], "expanded_prompt_len": len(tokens)}
