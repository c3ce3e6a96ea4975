"""Requests and responses of image, video and audio generation."""

from typing import Any

from dynamo.common.protocols.video_protocol import NvCreateVideoRequest, NvVideosResponse, VideoData

MEDIA_PASSTHROUGH_KEY = "media_passthrough"
"""Key of `extra_args` with the fields of a request that its protocol does not have."""
RESERVED = frozenset({"extra_args", "guardrails", "frame_interpolation_model_path"})
UNSAFE = (
    "path",
    "checkpoint",
    "ckpt",
    "repo",
    "hub",
    "url",
    "uri",
    "local_dir",
    "guardrail",
    "safety",
    "nsfw",
    "moderation",
)
"""Parts of names that select files, locations or policies, which are not up to a request."""

__all__ = [
    "MEDIA_PASSTHROUGH_KEY",
    "MediaPassthroughRejected",
    "NvCreateVideoRequest",
    "NvVideosResponse",
    "VideoData",
    "sanitize_media_passthrough",
]


class MediaPassthroughRejected(ValueError):
    """A request with a field that requests cannot set."""


def sanitize_media_passthrough(extra_args: dict[str, Any] | None) -> dict[str, Any]:
    """Return the further fields of a request. Raise `MediaPassthroughRejected` for one that is not permitted."""
    fields = {**((extra_args or {}).get(MEDIA_PASSTHROUGH_KEY) or {})}
    for name in filter(_is_rejected, sorted(fields)):
        raise MediaPassthroughRejected(f"field {name}: cannot be set by a request")
    return fields


def _is_rejected(name: str) -> bool:
    return name in RESERVED or name.startswith("_") or any(part in name.lower() for part in UNSAFE)
