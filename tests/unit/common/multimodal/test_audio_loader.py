"""Loader of audio."""

from typing import Any

import numpy as np
import pytest

from dynamo.common.http import HttpConfigurationError, HttpStatusError
from dynamo.common.http.url_validator import UrlValidationError, UrlValidationPolicy
from dynamo.common.multimodal import audio_loader
from dynamo.common.multimodal.audio_loader import AudioLoader
from dynamo.common.multimodal.codec_errors import MissingMediaDecoderError

DATA_URL = "data:audio/wav;base64,UklGRg=="


class Decoder:
    def __init__(self, samples: int = 4, error: Exception | None = None) -> None:
        self.samples, self.error = samples, error

    def load_bytes(self, content: bytes) -> tuple[Any, float]:
        assert content == b"RIFF"
        if self.error is not None:
            raise self.error
        return np.zeros(self.samples, np.float32), 16000


def loader(monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> AudioLoader:
    monkeypatch.setattr(audio_loader, "AudioMediaIO", lambda: decoder)
    return AudioLoader(url_policy=UrlValidationPolicy())


async def test_waveform_has_the_rate_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    [(waveform, rate)] = await loader(monkeypatch, Decoder()).load_audio_batch([{"Url": DATA_URL}])
    assert (waveform.shape, rate) == ((4,), 16000.0)


@pytest.mark.parametrize(
    ("decoder", "kind", "text"),
    [
        (Decoder(samples=0), ValueError, "empty"),
        (Decoder(error=OSError("no format")), ValueError, "no format"),
        (Decoder(error=ImportError("install vllm[audio]")), MissingMediaDecoderError, "install_media_decoders vllm"),
    ],
)
async def test_audio_error_class_distinguishes_client_and_deployment_errors(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        await loader(monkeypatch, decoder).load_audio(DATA_URL)
    assert text in str(caught.value)


async def test_missing_vllm_is_an_error_of_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_loader, "AudioMediaIO", None)
    with pytest.raises(MissingMediaDecoderError, match="pip install vllm"):
        await AudioLoader(url_policy=UrlValidationPolicy()).load_audio(DATA_URL)


async def test_error_of_the_client_has_precedence_within_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: dict[str, Exception] = {
        "a": ValueError("invalid"),
        "b": HttpConfigurationError("proxy"),
        "c": HttpStatusError(415, "type", "https://host/c"),
    }

    async def fail(url: str) -> Any:
        raise errors[url]

    loading = loader(monkeypatch, Decoder())
    monkeypatch.setattr(loading, "load_audio", fail)
    for urls, expected in (("abc", "c"), ("ab", "b"), ("a", "a")):
        with pytest.raises(Exception) as caught:  # noqa: PT011, B017, RUF100 -- compared below
            await loading.load_audio_batch([{"Url": url} for url in urls])
        assert caught.value is errors[expected]


async def test_items_of_other_kinds_and_urls_that_are_not_permitted_are_refused() -> None:
    loading = AudioLoader(url_policy=UrlValidationPolicy())
    with pytest.raises(ValueError, match="Invalid audio multimodal item"):
        await loading.load_audio_batch([{"Other": ""}])
    with pytest.raises(ValueError, match="enable_frontend_decoding=False"):
        await loading.load_audio_batch([{"Decoded": {}}])
    with pytest.raises(UrlValidationError):
        await loading.load_audio("http://example.com/audio.wav")


async def test_audio_decoded_by_a_frontend_requires_its_sample_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(connector: Any, metadata: Any, *, return_metadata: bool) -> Any:
        return np.zeros(2), metadata["metadata"]

    monkeypatch.setattr(audio_loader, "_create_nixl_connector", object)
    monkeypatch.setattr(audio_loader, "read_decoded_media_via_nixl", read)
    loading = AudioLoader(enable_frontend_decoding=True)
    [(_, rate)] = await loading.load_audio_batch([{"Decoded": {"metadata": {"sample_rate": 8000}}}])
    assert rate == 8000.0
    with pytest.raises(ValueError, match="sample_rate"):
        await loading.load_audio_batch([{"Decoded": {"metadata": None}}])
