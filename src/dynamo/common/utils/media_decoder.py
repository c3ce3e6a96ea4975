"""Options of the media decoder of frontends."""

import logging
from typing import Any

from dynamo.core.config import environ

logger = logging.getLogger(__name__)

DEFAULT_FRONTEND_IMAGE_DECODER_MAX_ALLOC = 128 * 1024 * 1024  # Bytes.
DYN_MM_VIDEO_NUM_FRAMES = "DYN_MM_VIDEO_NUM_FRAMES"
DEFAULT_FRONTEND_VIDEO_NUM_FRAMES = 32


def positive_int(name: str, default: int) -> int:
    """Return the positive integer in a variable; the default, with a warning, for other text."""
    text = environ().get(name, "").strip()
    if not text:
        return default
    if text.isdecimal() and int(text) > 0:
        return int(text)
    logger.warning("ignored %s=%r: must be a positive integer; using %d", name, text, default)
    return default


def build_frontend_image_decoder_options(
    *, max_alloc: int = DEFAULT_FRONTEND_IMAGE_DECODER_MAX_ALLOC
) -> dict[str, Any]:
    """Return the options of the image decoder, which may allocate `max_alloc` bytes for one image."""
    return {"limits": {"max_alloc": max_alloc}}


def enable_frontend_video_decoding(media_decoder: Any) -> None:
    """Enable the decoding of videos, where the decoder has it."""
    frames = positive_int(DYN_MM_VIDEO_NUM_FRAMES, DEFAULT_FRONTEND_VIDEO_NUM_FRAMES)
    try:
        media_decoder.enable_video({"max_frames": frames})
    except AttributeError:
        logger.warning("frontends do not decode videos: built without upstream's feature media-ffmpeg")
