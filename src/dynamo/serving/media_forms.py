"""Media responses: formats of generated images, audio and video for clients."""

import binascii
from base64 import b64decode
from typing import Any

from dynamo.core.codec import json_encode
from dynamo.core.errors import StreamIncomplete, Unknown
from dynamo.protocols.media import Clip, Clips, Images
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import DONE
from dynamo.serving.response_form import Form, Whole, converted

AUDIO_TYPES = {"mp3": b"audio/mpeg", "opus": b"audio/opus", "aac": b"audio/aac", "flac": b"audio/flac"}
"""Media types of formats that are not named after them."""
FRAME = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n"
FAILED = "failed"


class ImagesForm(Form):
    """Images, sent in one response."""

    def __init__(self) -> None:
        self._whole: Images | None = None

    def add(self, value: Any) -> bytes:
        output: Images = converted(value, Images)
        for image in output.data:
            if (image.url.__class__ is str) is (image.b64_json.__class__ is str):
                raise Unknown("the worker's image has no url and no b64_json, or both")
        if self._whole is not None:
            output.data = [*self._whole.data, *output.data]
        self._whole = output
        return b""

    def end(self) -> Whole:
        if self._whole is None:
            raise StreamIncomplete("the worker ended its stream without an image")
        return Whole(json_encode(self._whole))


class SpeechForm(Form):
    """Audio, as a stream of bytes or events, or as a URL."""

    def __init__(self, *, as_events: bool = False) -> None:
        self._as_events = as_events
        self._has_begun = False
        self._links: Clips | None = None

    def add(self, value: Any) -> bytes:
        output: Clips = converted(value, Clips)
        if output.status == FAILED:
            if self._has_begun:
                raise Unknown(f"the worker failed: {output.error}")
            self.refusal = Whole(json_encode(output), status=400)
            return b""
        pieces = [b"" if clip.url is not None else bytes_of(clip) for clip in output.data]
        if any(clip.url is not None for clip in output.data):
            output.data = [*(self._links.data if self._links is not None else ()), *output.data]
            self._links = output
            return b""
        if not self._has_begun and output.data and not self._as_events:
            name = output.data[0].output_format.lower()
            self.media = AUDIO_TYPES.get(name, b"audio/" + _word(name))
        sound = b"".join(pieces)
        self._has_begun = self._has_begun or bool(sound)
        if not self._as_events:
            return sound
        return b"".join(
            b"data: " + json_encode({"type": "speech.audio.delta", "audio": clip.b64_json}) + b"\n\n"
            for clip in output.data
        )

    def end(self) -> Whole | bytes:
        if self._links is not None:
            if self._has_begun:
                raise Unknown("the worker sent both audio data and a URL")
            return Whole(json_encode(self._links))
        if not self._has_begun:
            raise Unknown("the worker ended its stream without audio")
        return b'data: {"type":"speech.audio.done"}\n\n' if self._as_events else b""

    def failure(self, error: ErrorAnswer) -> bytes | None:
        """Return None: raw bytes cannot carry an error, so the connection is aborted."""
        return error.event() if self._as_events else None


class VideosForm(Form):
    """Videos in one response; the last progress report gives the state of an unfinished one."""

    def __init__(self) -> None:
        self._whole: Clips | None = None

    def add(self, value: Any) -> bytes:
        output: Clips = converted(value, Clips)
        if self._whole is not None:
            output.data = [*self._whole.data, *output.data]
        self._whole = output
        return b""

    def end(self) -> Whole:
        if self._whole is None:
            raise StreamIncomplete("the worker ended its stream without an answer")
        return Whole(json_encode(self._whole))


class VideoEventsForm(Form):
    """Video progress, one event per step."""

    def __init__(self) -> None:
        self._has_begun = False

    def add(self, value: Any) -> bytes:
        output: Clips = converted(value, Clips)
        self._has_begun = True
        return b"data: " + json_encode(output) + b"\n\n"

    def end(self) -> bytes:
        if not self._has_begun:
            raise StreamIncomplete("the worker ended its stream without an answer")
        return DONE


class FramesForm(Form):
    """Video frames while they are generated: JPEG images as parts of one multipart response."""

    media = b"multipart/x-mixed-replace; boundary=frame"

    def __init__(self) -> None:
        self._has_begun = False

    def add(self, value: Any) -> bytes:
        output: Clips = converted(value, Clips)
        if output.status == FAILED:
            raise Unknown(f"the worker failed: {output.error}")
        frames = [bytes_of(clip) for clip in output.data]
        self._has_begun = self._has_begun or bool(frames)
        return b"".join(FRAME % (len(frame), frame) for frame in frames)

    def end(self) -> bytes:
        if not self._has_begun:
            raise Unknown("the worker ended its stream without a frame")
        return b""

    def failure(self, error: ErrorAnswer) -> bytes | None:
        """Return None: frames cannot carry an error, so the connection is aborted."""
        return None


def bytes_of(clip: Clip) -> bytes:
    """Return the audio data of a chunk. Raise `Unknown` if it has none."""
    try:
        return b64decode(clip.b64_json if clip.b64_json is not None else "?", validate=True)
    except (binascii.Error, ValueError):
        raise Unknown("the worker's chunk has no valid b64_json") from None


def _word(name: str) -> bytes:
    """Return the format's name for use in a header. Raise `Unknown`."""
    if not (name.isascii() and name.replace("-", "").replace(".", "").isalnum()):
        raise Unknown(f"the worker's output_format is {name!r}")
    return name.encode("ascii")
