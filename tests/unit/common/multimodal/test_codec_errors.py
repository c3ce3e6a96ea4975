"""Errors for media that cannot be decoded."""

import importlib.metadata
import sys
from types import ModuleType

import pytest

from dynamo.common.multimodal import codec_errors
from dynamo.common.multimodal.codec_errors import audio_decoder_missing, video_decoder_missing
from dynamo.common.utils.install_media_decoders import VALIDATED_SPECS

OPENCV = ("vllm", "opencv-python-headless", "cv2")


@pytest.fixture(autouse=True)
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("av", "cv2", "decord"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(codec_errors, "nvdec_available", lambda: True)


def test_video_error_names_codec_package_installer_and_cause() -> None:
    text = str(video_decoder_missing(*OPENCV, "vp9", cause="No module named 'cv2'"))
    for part in ("'vp9'", VALIDATED_SPECS["opencv-python-headless"], "install_media_decoders vllm", "H.264/H.265"):
        assert part in text
    assert text.endswith("(decoder reported: No module named 'cv2')")
    assert "an undetected codec" in str(video_decoder_missing("sglang", "decord2", "decord", None))


def test_hardware_codec_without_nvdec_names_the_driver_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NVIDIA_DRIVER_CAPABILITIES" not in str(video_decoder_missing(*OPENCV, "h264"))
    monkeypatch.setattr(codec_errors, "nvdec_available", lambda: False)
    assert "NVIDIA_DRIVER_CAPABILITIES" in str(video_decoder_missing(*OPENCV, "h264"))


@pytest.mark.parametrize("version", ["5.0.0.93", None])
def test_opencv_without_video_is_replaced_at_its_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def installed(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setitem(sys.modules, "cv2", ModuleType("cv2"))
    monkeypatch.setattr(codec_errors.importlib.metadata, "version", installed)
    text = str(video_decoder_missing(*OPENCV, "vp9"))
    assert f"opencv-python-headless=={version or '<cv2-version>.*'}" in text
    assert "without a video backend" in text
    assert "--force-reinstall --only-binary opencv-python-headless" in text
    assert ("print(cv2.__version__)" in text) is (version is None)


def test_audio_error_names_the_package() -> None:
    error = audio_decoder_missing("vllm")
    assert not isinstance(error, ValueError)
    assert VALIDATED_SPECS["av"] in str(error)
    assert "NVDEC does not decode audio" in str(error)
