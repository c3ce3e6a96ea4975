"""Errors for media that an engine cannot decode, with the command that installs the decoder."""

import importlib
import importlib.metadata

from dynamo.common.multimodal.nvdec_decoder import HW_ROUTED_CODECS, nvdec_available
from dynamo.common.utils.install_media_decoders import VALIDATED_SPECS, installer_covers
from dynamo.core.boundaries import ErrorBoundary

INSTALLER_CMD = "python -m dynamo.common.utils.install_media_decoders"


class MissingMediaDecoderError(RuntimeError):
    """A decoder that is not installed: an error of the deployment, hence not a `ValueError`, which blames the request."""


def video_decoder_missing(
    backend: str, package: str, module: str, codec: str | None, cause: str | None = None
) -> MissingMediaDecoderError:
    """Return the error for a video. `cause` is the decoder's own message."""
    named = f"the codec {codec!r}" if codec else "an undetected codec"
    problem = f"cannot decode video with {named}: "
    if codec in HW_ROUTED_CODECS and not nvdec_available():
        problem += (
            "NVDEC is unavailable; grant the container the driver capability 'video' (NVIDIA_DRIVER_CAPABILITIES), "
            f"or install the software decoder {module}"
        )
    elif _is_source_built_opencv(backend, module):
        problem += f"{module} is installed without a video backend; replace it, or encode the video as H.264/H.265"
    else:
        problem += f"the decoder {module} is not usable; install it, or encode the video as H.264/H.265 for NVDEC"
    return _error(problem, _install_hint(backend, package, module), cause)


def audio_decoder_missing(backend: str, cause: str | None = None) -> MissingMediaDecoderError:
    """Return the error for audio. `cause` is the decoder's own message."""
    problem = "cannot decode audio: the decoder av is not usable, and NVDEC does not decode audio; install it"
    return _error(problem, _install_hint(backend, "av", "av"), cause)


def _error(problem: str, remedy: str, cause: str | None) -> MissingMediaDecoderError:
    # HTTP responses contain the text of the error only, not its __cause__.
    reported = f" (decoder reported: {cause})" if cause else ""
    return MissingMediaDecoderError(f"{problem}: {remedy}{reported}")


def _install_hint(backend: str, package: str, module: str) -> str:
    """Return the commands that install a package."""
    options, spec, first = "--no-deps", VALIDATED_SPECS[package], ""
    if backend == "vllm" and module == "cv2":
        # vLLM's OpenCV is a source build without video, which pip would keep, or build again.
        options += f" --force-reinstall --only-binary {package}"
    if _is_source_built_opencv(backend, module):
        version = _installed_version(package)
        if version is None:
            first = f"read the version with python -c 'import {module}; print({module}.__version__)', then "
        spec = f"{package}=={version or f'<{module}-version>.*'}"
    command = f"{first}pip install {options} '{spec}'"
    return f"{INSTALLER_CMD} {backend}, or {command}" if installer_covers(backend, package) else command


def _is_source_built_opencv(backend: str, module: str) -> bool:
    """Return whether OpenCV can be imported for vLLM, whose build has no video backend."""
    if backend != "vllm" or module != "cv2":
        return False
    with ErrorBoundary(lambda _: None):  # A broken library raises whatever its initialization raises.
        importlib.import_module(module)
        return True
    return False


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
