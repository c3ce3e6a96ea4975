"""Decoding of H.264 and H.265 video on the GPU by NVDEC, with the package PyNvVideoCodec."""

import functools
import importlib
import importlib.util
import logging
import math
import tempfile
from typing import Any

import numpy as np

from dynamo.common.utils.env import env_bool
from dynamo.core.config import environ

logger = logging.getLogger(__name__)

DISABLE_ENV = "DYN_DISABLE_NVDEC"
GPU_ID_ENV = "DYN_NVDEC_GPU_ID"
FALLBACK_FPS = 30.0
"""Rate of a source without a usable one: models divide by the rate."""

HW_ROUTED_CODECS = frozenset({"h264", "hevc"})

_CODEC_MARKERS = (
    (b"hev1", "hevc"),
    (b"hvc1", "hevc"),
    (b"V_MPEGH/ISO/HEVC", "hevc"),
    (b"av01", "av1"),
    (b"V_AV1", "av1"),
    (b"avc1", "h264"),
    (b"avc3", "h264"),
    (b"V_MPEG4/ISO/AVC", "h264"),
    (b"vp09", "vp9"),
    (b"V_VP9", "vp9"),
    (b"vp08", "vp8"),
    (b"V_VP8", "vp8"),
)
"""Codes of codecs in MP4 and Matroska files; the first of this order wins."""


def probe_video_codec(data: bytes) -> str | None:
    """Return the codec (h264, hevc, av1, vp9 or vp8) whose code is in a file; None without one."""
    return next((codec for marker, codec in _CODEC_MARKERS if marker in data), None)


@functools.cache
def nvdec_available() -> bool:
    """Return whether PyNvVideoCodec can be imported and `DYN_DISABLE_NVDEC` is not set."""
    if env_bool(DISABLE_ENV):
        return False
    try:
        import PyNvVideoCodec  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:  # Without the driver's libraries it raises RuntimeError.
        if importlib.util.find_spec("PyNvVideoCodec") is not None:
            logger.warning(
                "cannot import PyNvVideoCodec: %s; grant the container the driver capability 'video' "
                "(NVIDIA_DRIVER_CAPABILITIES) to decode H.264 and H.265",
                error,
            )
        return False
    return True


def should_use_nvdec(codec: str | None) -> bool:
    """Return whether a codec is decoded by NVDEC."""
    return codec in HW_ROUTED_CODECS and nvdec_available()


def decode_video_nvdec(
    data: bytes, num_frames: int, gpu_id: int | None = None, fps: float = -1
) -> tuple["np.ndarray[Any, Any]", dict[str, Any]]:
    """Return frames of equal distance, of shape (frames, height, width, 3) and type uint8, and the video's metadata.

    At most `num_frames`, and with a positive `fps` at most that many per second. Raise `RuntimeError` for a video
    without frames.
    """
    if num_frames < 1:
        raise ValueError(f"num_frames must be >= 1, got {num_frames}")
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:  # The decoder reads from it until the last frame.
        file.write(data)
        file.flush()
        decoder = _opened(file.name, _gpu_id() if gpu_id is None else gpu_id)
        rate, available = _source_fps(decoder), len(decoder)
        chosen = np.linspace(
            0, available - 1, _compute_num_frames(num_frames, fps, available, rate), dtype=int
        ).tolist()
        frames = np.ascontiguousarray(np.stack([_frame_to_rgb_hwc(decoder[index]) for index in chosen]))
    metadata = {"fps": rate, "frames_indices": chosen, "total_num_frames": available}
    # The model may sample only where nothing has been left out.
    return frames, metadata | {"do_sample_frames": len(chosen) == available}


def _opened(path: str, gpu_id: int) -> Any:
    """Return the decoder of a file, with frames in host memory. Raise `RuntimeError` for a video without frames."""
    import PyNvVideoCodec as Codec

    colors = Codec.OutputColorType.RGB
    decoder = Codec.SimpleDecoder(path, gpu_id=gpu_id, output_color_type=colors, use_device_memory=False)
    if not len(decoder):
        raise RuntimeError(f"NVDEC decode produced no frames of {path}")
    return decoder


def _compute_num_frames(num_frames: int, target_fps: float, total_frames: int, source_fps: float) -> int:
    """Return the number of frames within all limits, at least 1."""
    limits = [num_frames, total_frames]
    if target_fps > 0:
        duration_s = total_frames / source_fps
        limits.append(math.floor(duration_s * target_fps))
    return max(1, min(limits))


def _source_fps(decoder: Any) -> float:
    """Return the frame rate of the source, never 0. Versions of PyNvVideoCodec state it in different places."""
    metadata = decoder.get_stream_metadata() if hasattr(decoder, "get_stream_metadata") else None
    duration = _positive(getattr(metadata, "duration", 0))
    candidates = (
        getattr(metadata, "average_fps", 0),
        decoder.get_fps() if hasattr(decoder, "get_fps") else 0,
        getattr(decoder, "fps", 0),
        _positive(getattr(metadata, "num_frames", 0)) / duration if duration else 0,
    )
    return next((rate for rate in map(_positive, candidates) if rate), FALLBACK_FPS)


def _positive(value: Any) -> float:
    """Return a positive finite number; 0 for anything else."""
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else 0.0


def _frame_to_rgb_hwc(frame: Any) -> "np.ndarray[Any, Any]":
    """Return a decoded frame in host memory, of shape (height, width, 3)."""
    import torch

    array: np.ndarray[Any, Any] = torch.utils.dlpack.from_dlpack(frame).cpu().numpy()
    return array


def _gpu_id() -> int:
    """Return the GPU of `DYN_NVDEC_GPU_ID`; 0, with a warning, for other text."""
    text = environ().get(GPU_ID_ENV, "").strip()
    if not text or text.isdecimal():
        return int(text or 0)
    logger.warning("ignored %s=%r: must be a GPU number; using GPU 0", GPU_ID_ENV, text)
    return 0
