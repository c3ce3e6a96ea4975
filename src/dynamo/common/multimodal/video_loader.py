"""VideoLoader: frames from URLs, files and frontends, decoded by NVDEC or vLLM."""

import asyncio
import functools
import logging
import sys
from functools import partial
from typing import Any

import numpy as np

from dynamo.common.http import fetch_bytes
from dynamo.common.http.media_reference import max_media_bytes
from dynamo.common.http.url_validator import UrlValidationPolicy, validate_media_url
from dynamo.common.multimodal.codec_errors import MissingMediaDecoderError, video_decoder_missing
from dynamo.common.multimodal.media_items import DECODED_VARIANT_KEY, URL_VARIANT_KEY, load_batch, load_or_reject
from dynamo.common.multimodal.media_source import is_local_media_url, read_local_media_bytes
from dynamo.common.multimodal.nvdec_decoder import decode_video_nvdec, probe_video_codec, should_use_nvdec
from dynamo.common.utils.media_nixl import create_nixl_connector as _create_nixl_connector
from dynamo.common.utils.media_nixl import read_decoded_media_via_nixl
from dynamo.core.boundaries import ErrorBoundary

__all__ = ["DECODED_VARIANT_KEY", "URL_VARIANT_KEY", "VideoLoader", "read_decoded_media_via_nixl"]

logger = logging.getLogger(__name__)

Video = tuple["np.ndarray[Any, Any]", dict[str, Any]]
"""Frames of shape (frames, height, width, 3), and vLLM's metadata: fps, frames_indices, total_num_frames."""

OPENCV_SIGNS = ("cv2", "VideoCapture", "Could not open video stream")
"""Texts in the errors of OpenCV and of vLLM's use of it."""


class VideoLoader:
    """Loader of the videos of requests, of which `num_frames` frames at most are decoded."""

    NUM_FRAMES_DEFAULT = 32

    def __init__(
        self,
        http_timeout: float = 60.0,
        num_frames: int = NUM_FRAMES_DEFAULT,
        enable_frontend_decoding: bool = False,
        url_policy: UrlValidationPolicy | None = None,
    ) -> None:
        self._http_timeout, self._num_frames = http_timeout, num_frames
        self._enable_frontend_decoding = enable_frontend_decoding
        self._url_policy = url_policy if url_policy is not None else UrlValidationPolicy.from_env()
        self._nixl_connector = _create_nixl_connector() if enable_frontend_decoding else None

    async def load_video(self, video_url: str, media_io_kwargs: dict[str, Any] | None = None) -> Video:
        """Return a video. `media_io_kwargs` are options of vLLM's decoder.

        Raise `UrlValidationError`, `HttpStatusError`, `MissingMediaDecoderError` or `ValueError`.
        """

        async def load() -> Video:
            frames, metadata = await self._load_video_with_vllm(video_url, media_io_kwargs)
            return np.ascontiguousarray(frames), metadata

        return await load_or_reject("video", video_url, load)

    async def load_video_batch(
        self, video_mm_items: list[dict[str, Any]], media_io_kwargs: dict[str, Any] | None = None
    ) -> list[Video]:
        """Return the videos of a request: of URLs, and decoded by a frontend."""
        decoded = self._load_decoded_video if self._enable_frontend_decoding else None
        load_url = functools.partial(self.load_video, media_io_kwargs=media_io_kwargs)
        return await load_batch("video", video_mm_items, load_url, decoded)

    def _create_vllm_video_io(self, media_io_kwargs: dict[str, Any] | None = None) -> Any:
        try:
            from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
        except ImportError as error:
            raise MissingMediaDecoderError(f"video is decoded by vLLM: pip install vllm ({error})") from error
        return VideoMediaIO(ImageMediaIO(), **{"num_frames": self._num_frames, **(media_io_kwargs or {})})

    async def _load_video_with_vllm(self, video_url: str, media_io_kwargs: dict[str, Any] | None = None) -> Video:
        url = await validate_media_url(video_url, self._url_policy)
        media_io = self._create_vllm_video_io(media_io_kwargs)
        if is_local_media_url(url):
            content = await read_local_media_bytes(url, self._url_policy)
        else:
            content = await fetch_bytes(url, self._http_timeout, policy=self._url_policy, max_bytes=max_media_bytes())
        return await self._decode_video_bytes(content, media_io)

    async def _decode_video_bytes(self, content: bytes, media_io: Any) -> Video:
        """Return a video, decoded by NVDEC if it can, else by vLLM."""
        codec = probe_video_codec(content)
        if should_use_nvdec(codec):
            with ErrorBoundary(partial(_warn_of_nvdec, codec)):  # PyNvVideoCodec's errors have no common class.
                return await asyncio.to_thread(decode_video_nvdec, content, **self._extract_nvdec_args(media_io))
        try:
            video: Video = await asyncio.to_thread(media_io.load_bytes, content)
        except (ImportError, OSError, SystemError, ValueError) as error:
            if _attributable_to_cv2(error, media_io):
                raise video_decoder_missing("vllm", "opencv-python-headless", "cv2", codec, cause=str(error)) from error
            raise
        return video

    def _extract_nvdec_args(self, media_io: Any) -> dict[str, Any]:
        """Return the limits of the frames that vLLM's decoder would apply; its other options are of its decoders."""
        count = getattr(media_io, "num_frames", self._num_frames)
        fps = getattr(media_io, "kwargs", {}).get("fps", -1)
        return {"num_frames": count if count > 0 else sys.maxsize, "fps": fps}

    async def _load_decoded_video(self, decoded_metadata: dict[str, Any]) -> Video:
        frames, metadata = await read_decoded_media_via_nixl(
            self._nixl_connector, decoded_metadata, return_metadata=True
        )
        return np.ascontiguousarray(frames), self._normalize_frontend_metadata(metadata or {}, len(frames))

    @staticmethod
    def _normalize_frontend_metadata(metadata: dict[str, Any], frame_count: int) -> dict[str, Any]:
        """Return the metadata of a frontend's decoder as vLLM's."""
        video = metadata.get("Video")
        if video is None:
            return metadata
        fps, duration = float(video["source_fps"]), float(video["source_duration"])
        total = max(round(fps * duration), frame_count)
        return {
            "fps": fps,
            "duration": duration,
            "frames_indices": [min(round(moment * fps), total - 1) for moment in video["sampled_timestamps"]],
            "total_num_frames": total,
            "video_backend": "dynamo_frontend",
            "do_sample_frames": False,
        }


def _attributable_to_cv2(error: BaseException, media_io: Any) -> bool:
    """Return whether OpenCV, not another decoder, failed because it is missing or has no video."""
    if getattr(media_io, "kwargs", {}).get("video_backend", "opencv") != "opencv":
        return False
    if isinstance(error, ImportError):
        return error.name == "cv2" or "cv2" in str(error)
    return any(sign in str(error) for sign in OPENCV_SIGNS) and _cv2_lacks_video_backend()


@functools.cache
def _cv2_lacks_video_backend() -> bool:
    """Return whether OpenCV is installed without the backend that reads video files."""
    try:
        import cv2  # type: ignore[import-not-found,unused-ignore]
    except (ImportError, OSError):
        return False
    return cv2.CAP_FFMPEG not in cv2.videoio_registry.getBackends()


def _warn_of_nvdec(codec: str | None, error: Exception) -> None:
    logger.warning("NVDEC failed to decode %s: %s; using the software decoder", codec, error)
