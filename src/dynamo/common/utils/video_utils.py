"""Generated videos: sizes and numbers of frames of a request, and the encoding of frames."""

import io
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.core.boundaries import ErrorBoundary

DEFAULT_VIDEO_WIDTH = 832
DEFAULT_VIDEO_HEIGHT = 480
DEFAULT_VIDEO_FPS = 16
DEFAULT_VIDEO_NUM_FRAMES = 97
CODECS = {"mp4": "libvpx-vp9", "webm": "libvpx-vp9"}
"""Containers and the codec of their frames, which needs no licence."""

Array = np.ndarray[Any, Any]


def parse_size(
    size: str | None, default_w: int = DEFAULT_VIDEO_WIDTH, default_h: int = DEFAULT_VIDEO_HEIGHT
) -> tuple[int, int]:
    """Return width and height of `WIDTHxHEIGHT`; the default for other text."""
    width, _, height = (size or "").lower().partition("x")
    if width.isdecimal() and height.isdecimal():
        return int(width), int(height)
    return default_w, default_h


def compute_num_frames(
    num_frames: int | None = None,
    seconds: int | None = None,
    fps: float | None = None,
    default_fps: int = DEFAULT_VIDEO_FPS,
    default_num_frames: int = DEFAULT_VIDEO_NUM_FRAMES,
) -> int:
    """Return the number of frames: as given, else for the duration, else the default."""
    duration = None if seconds is None else round(seconds * (fps or default_fps))
    return next(frames for frames in (num_frames, duration, default_num_frames) if frames is not None)


def normalize_video_frames(images: list[Any]) -> list[Any]:
    """Return the frames of a video that is a list of frames, or a list with one tensor or array of all frames."""
    if len(images) != 1 or not hasattr(images[0], "ndim"):
        return images
    video = images[0]
    if hasattr(video, "detach"):
        video = video.detach().cpu().float().numpy()
    if video.ndim == 5:  # A batch with one video.
        video = video[0]
    return list(video) if video.ndim == 4 else [video]


def frames_to_numpy(images: list[Any]) -> Array:
    """Return frames, images or arrays with values 0 to 1 or 0 to 255, as one array of 8-bit RGB.

    Raise `ValueError` without a frame, and for frames of different sizes.
    """
    if not images:
        raise ValueError("No images provided: a video needs a frame")
    frames = [_rgb(image) for image in images]
    sizes = {frame.shape for frame in frames}
    if len(sizes) > 1:
        raise ValueError(f"frames have different sizes: {sorted(sizes)}")
    return np.stack(frames)


def _rgb(image: Any) -> Array:
    frame = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if np.issubdtype(frame.dtype, np.floating):
        frame = np.rint(np.clip(frame, 0, 1) * 255)
    return frame.astype(np.uint8)


def encode_to_mp4(frames: Array, output_dir: str, request_id: str, fps: int = DEFAULT_VIDEO_FPS) -> str:
    """Write frames to `OUTPUT_DIR/REQUEST_ID.mp4` and return the path. Raise `RuntimeError` if that fails."""
    path = Path(output_dir, f"{request_id}.mp4")

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(str(path), frames, fps, "mp4")

    _encode("Video encoding failed", write)
    return str(path)


def encode_to_video_bytes(frames: Array, fps: int = DEFAULT_VIDEO_FPS, output_format: str = "mp4") -> bytes:
    """Return frames as a video in a container, `mp4` or `webm`. Raise `RuntimeError` if that fails."""
    file = io.BytesIO()
    _encode("Video encoding to bytes failed", lambda: _write(file, frames, fps, output_format))
    return file.getvalue()


def _encode(message: str, write: Callable[[], None]) -> None:
    """Raise `RuntimeError` for any error of the encoder."""
    failures: list[Exception] = []
    with ErrorBoundary(failures.append):  # Each encoder raises errors of its own.
        write()
    for error in failures:
        if isinstance(error, ImportError):
            raise ImportError("videos require imageio: pip install imageio[pyav]") from error  # noqa: TRY004
        raise RuntimeError(f"{message}: {error}") from error


def _write(target: Any, frames: Array, fps: int, container: str) -> None:
    if container not in CODECS:
        raise ValueError(f"container {container}: expected {' or '.join(CODECS)}")
    import imageio.v3 as imageio

    if hasattr(imageio, "imwrite"):
        imageio.imwrite(target, frames, extension=f".{container}", fps=fps, codec=CODECS[container])
        return
    with closing(imageio.get_writer(target, format=container, fps=fps, codec=CODECS[container])) as writer:
        for frame in frames:
            writer.append_data(frame)
