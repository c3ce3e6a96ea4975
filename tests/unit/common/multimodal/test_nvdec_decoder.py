"""Decoding of video by NVDEC."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynamo.common.multimodal import nvdec_decoder


class Codec(ModuleType):
    """PyNvVideoCodec with a video of black frames."""

    OutputColorType = SimpleNamespace(RGB="RGB")

    def __init__(self, frames: int) -> None:
        super().__init__("PyNvVideoCodec")
        self.frames = frames
        self.gpu = -1

    def SimpleDecoder(self, file: str, *, gpu_id: int, **options: Any) -> Any:
        self.gpu = gpu_id
        return Video(self.frames)


class Video(list[Any]):
    def __init__(self, frames: int, **metadata: float) -> None:
        super().__init__(np.full((2, 4, 3), index, np.uint8) for index in range(frames))
        self.metadata = SimpleNamespace(**metadata)

    def get_stream_metadata(self) -> Any:
        return self.metadata


@pytest.fixture(autouse=True)
def codec(monkeypatch: pytest.MonkeyPatch) -> Iterator[Codec]:
    module = Codec(90)
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", module)
    monkeypatch.setattr(nvdec_decoder, "_frame_to_rgb_hwc", np.asarray)
    nvdec_decoder.nvdec_available.cache_clear()
    yield module
    nvdec_decoder.nvdec_available.cache_clear()


@pytest.mark.parametrize(
    ("data", "codec"), [(b"..avc1", "h264"), (b"hvc1", "hevc"), (b"V_VP9", "vp9"), (b"av01", "av1"), (b"text", None)]
)
def test_codec_is_found_by_its_code(data: bytes, codec: str | None) -> None:
    assert nvdec_decoder.probe_video_codec(data) == codec


def test_nvdec_decodes_two_codecs_unless_it_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [nvdec_decoder.should_use_nvdec(codec) for codec in ("h264", "hevc", "vp9", None)] == [
        True,
        True,
        False,
        False,
    ]
    nvdec_decoder.nvdec_available.cache_clear()
    monkeypatch.setenv(nvdec_decoder.DISABLE_ENV, "1")
    assert not nvdec_decoder.should_use_nvdec("h264")


@pytest.mark.parametrize(
    ("num_frames", "fps", "indices"), [(4, -1, [0, 29, 59, 89]), (32, 1, [0, 44, 89]), (32, 0.1, [0])]
)
def test_frames_are_sampled_within_both_limits(num_frames: int, fps: float, indices: list[int]) -> None:
    frames, metadata = nvdec_decoder.decode_video_nvdec(b"video", num_frames, fps=fps)
    assert frames[:, 0, 0, 0].tolist() == indices
    assert metadata == {"fps": 30.0, "frames_indices": indices, "total_num_frames": 90, "do_sample_frames": False}


def test_short_video_is_returned_whole_for_the_model_to_sample(codec: Codec) -> None:
    codec.frames = 3
    frames, metadata = nvdec_decoder.decode_video_nvdec(b"video", 32)
    assert frames.shape == (3, 2, 4, 3)
    assert metadata["do_sample_frames"] is True


def test_video_without_frames_and_count_below_one_are_errors(codec: Codec) -> None:
    with pytest.raises(ValueError, match="num_frames"):
        nvdec_decoder.decode_video_nvdec(b"video", 0)
    codec.frames = 0
    with pytest.raises(RuntimeError, match="no frames"):
        nvdec_decoder.decode_video_nvdec(b"video", 1)


def test_gpu_of_the_environment_must_be_a_number(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, gpu in (("2", 2), ("first", 0)):
        monkeypatch.setenv(nvdec_decoder.GPU_ID_ENV, text)
        nvdec_decoder.decode_video_nvdec(b"video", 1)
        assert codec.gpu == gpu


def test_frame_rate_is_read_from_metadata_or_duration_and_is_never_zero() -> None:
    assert nvdec_decoder._source_fps(Video(1, average_fps=10.0)) == 10.0
    assert nvdec_decoder._source_fps(Video(1, num_frames=24, duration=2.0)) == 12.0
    assert nvdec_decoder._source_fps(Video(1, average_fps=0)) == nvdec_decoder.FALLBACK_FPS
