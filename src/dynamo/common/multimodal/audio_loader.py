"""AudioLoader: waveforms from URLs, files and frontends, decoded by vLLM."""

import asyncio
from typing import Any

import numpy as np

from dynamo.common.http import fetch_bytes
from dynamo.common.http.media_reference import max_media_bytes
from dynamo.common.http.url_validator import UrlValidationPolicy, validate_media_url
from dynamo.common.multimodal.codec_errors import MissingMediaDecoderError, audio_decoder_missing
from dynamo.common.multimodal.media_items import DECODED_VARIANT_KEY, URL_VARIANT_KEY, load_batch, load_or_reject
from dynamo.common.multimodal.media_source import is_local_media_url, read_local_media_bytes
from dynamo.common.utils.media_nixl import create_nixl_connector as _create_nixl_connector
from dynamo.common.utils.media_nixl import read_decoded_media_via_nixl

try:
    from vllm.multimodal.media import AudioMediaIO, MediaConnector
except ImportError:
    AudioMediaIO = MediaConnector = None

__all__ = [
    "DECODED_VARIANT_KEY",
    "URL_VARIANT_KEY",
    "AudioLoader",
    "AudioMediaIO",
    "MediaConnector",
    "read_decoded_media_via_nixl",
]

Waveform = tuple["np.ndarray[Any, Any]", float]
"""Samples and their rate, as in the source: vLLM resamples for its model."""


class AudioLoader:
    """Loader of the audio of requests."""

    def __init__(
        self,
        http_timeout: float = 30.0,
        enable_frontend_decoding: bool = False,
        url_policy: UrlValidationPolicy | None = None,
    ) -> None:
        self._http_timeout = http_timeout
        self._enable_frontend_decoding = enable_frontend_decoding
        self._url_policy = url_policy if url_policy is not None else UrlValidationPolicy.from_env()
        self._nixl_connector = _create_nixl_connector() if enable_frontend_decoding else None

    async def load_audio(self, audio_url: str) -> Waveform:
        """Return audio. Raise `UrlValidationError`, `HttpStatusError`, `MissingMediaDecoderError` or `ValueError`."""

        async def load() -> Waveform:
            try:
                waveform, rate = await self._load_audio_with_vllm(audio_url)
            except ImportError as error:
                raise audio_decoder_missing("vllm", cause=str(error)) from error
            if waveform.size == 0:
                raise ValueError("the audio is empty")
            return waveform, rate

        return await load_or_reject("audio", audio_url, load)

    async def load_audio_batch(self, audio_mm_items: list[dict[str, Any]]) -> list[Waveform]:
        """Return the audio of a request: of URLs, and decoded by a frontend."""
        decoded = self._load_decoded_audio if self._enable_frontend_decoding else None
        return await load_batch("audio", audio_mm_items, self.load_audio, decoded)

    def _create_vllm_audio_io(self) -> Any:
        if AudioMediaIO is None:
            raise MissingMediaDecoderError("audio is decoded by vLLM, which is not installed: pip install vllm")
        return AudioMediaIO()

    async def _load_audio_with_vllm(self, audio_url: str) -> Waveform:
        url = await validate_media_url(audio_url, self._url_policy)
        media_io = self._create_vllm_audio_io()
        if is_local_media_url(url):
            content = await read_local_media_bytes(url, self._url_policy)
        else:
            content = await fetch_bytes(url, self._http_timeout, policy=self._url_policy, max_bytes=max_media_bytes())
        waveform, rate = await asyncio.to_thread(media_io.load_bytes, content)
        return waveform, float(rate)

    async def _load_decoded_audio(self, decoded_metadata: dict[str, Any]) -> Waveform:
        waveform, metadata = await read_decoded_media_via_nixl(
            self._nixl_connector, decoded_metadata, return_metadata=True
        )
        metadata = (metadata or {}).get("Audio", metadata) or {}
        if "sample_rate" not in metadata:
            raise ValueError("decoded audio has no sample_rate in its metadata")
        return waveform, float(metadata["sample_rate"])
