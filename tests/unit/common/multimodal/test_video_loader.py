"""Loader of video."""

from typing import Any

import numpy as np
import pytest

from dynamo.common.http.url_validator import UrlValidationPolicy
from dynamo.common.multimodal import video_loader
from dynamo.common.multimodal.codec_errors import MissingMediaDecoderError
from dynamo.common.multimodal.video_loader import VideoLoader

FRAMES = np.zeros((2, 2, 4, 3), np.uint8)


class Decoder:
    """vLLM's decoder."""

    def __init__(self, error: Exception | None = None, **kwargs: Any) -> None:
        self.error, self.kwargs, self.num_frames = error, kwargs, 8

    def load_bytes(self, content: bytes) -> Any:
        if self.error is not None:
            raise self.error
        return FRAMES, {"decoder": "software"}


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> VideoLoader:
    monkeypatch.setattr(video_loader, "should_use_nvdec", lambda codec: codec == "h264")
    monkeypatch.setattr(video_loader, "_cv2_lacks_video_backend", lambda: True)
    return VideoLoader(url_policy=UrlValidationPolicy())


async def test_h264_is_decoded_by_nvdec_within_the_limits_of_vllm(
    loader: VideoLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_loader, "decode_video_nvdec", lambda content, **limits: (FRAMES, limits))
    assert (await loader._decode_video_bytes(b"avc1", Decoder(fps=2)))[1] == {"num_frames": 8, "fps": 2}
    assert (await loader._decode_video_bytes(b"vp09", Decoder()))[1] == {"decoder": "software"}


async def test_software_decodes_video_when_nvdec_fails(loader: VideoLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(content: bytes, **limits: Any) -> Any:
        raise RuntimeError("no session")

    monkeypatch.setattr(video_loader, "decode_video_nvdec", fail)
    assert (await loader._decode_video_bytes(b"avc1", Decoder()))[1] == {"decoder": "software"}


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'cv2'", name="cv2"), ValueError("Could not open video stream")]
)
async def test_opencv_without_video_is_a_missing_decoder(loader: VideoLoader, error: Exception) -> None:
    with pytest.raises(MissingMediaDecoderError, match="'vp9'"):
        await loader._decode_video_bytes(b"vp09", Decoder(error))


@pytest.mark.parametrize(
    "decoder",
    [
        Decoder(OSError("No space left")),
        Decoder(ModuleNotFoundError("No module named 'av'", name="av")),
        Decoder(ValueError("Could not open video stream"), video_backend="torchcodec"),
    ],
)
async def test_other_decoder_errors_are_raised_unchanged(loader: VideoLoader, decoder: Decoder) -> None:
    with pytest.raises(type(decoder.error)) as caught:  # type: ignore[arg-type]
        await loader._decode_video_bytes(b"vp09", decoder)
    assert caught.value is decoder.error


async def test_video_of_a_data_url_is_contiguous(loader: VideoLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_create_vllm_video_io", lambda options: Decoder(**(options or {})))
    [(frames, _)] = await loader.load_video_batch([{"Url": "data:video/webm;base64,Zm9v"}], {"fps": 1})
    assert frames.flags["C_CONTIGUOUS"]


def test_metadata_of_a_frontend_becomes_that_of_vllm() -> None:
    video = {"source_fps": 24.0, "source_duration": 10.0, "sampled_timestamps": [0.0, 5.0, 10.0]}
    metadata = VideoLoader._normalize_frontend_metadata({"Video": video}, 3)
    assert (metadata["frames_indices"], metadata["total_num_frames"]) == ([0, 120, 239], 240)
    assert metadata["do_sample_frames"] is False
    assert VideoLoader._normalize_frontend_metadata({"fps": 1.0}, 3) == {"fps": 1.0}
