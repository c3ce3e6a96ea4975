"""Media forms: what a worker's images, sounds and films become for a client."""

import binascii
from base64 import b64decode
from typing import Any

from dynamo.core.codec import json_encode
from dynamo.core.errors import StreamIncomplete, Unknown
from dynamo.protocols.media import Clip, Clips, Images
from dynamo.serving.embeddings import converted
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import DONE
from dynamo.serving.relay import Form, Whole

AUDIO_TYPES = {"mp3": b"audio/mpeg", "opus": b"audio/opus", "aac": b"audio/aac", "flac": b"audio/flac"}
"""Of formats whose name is not the end of their type's."""
FRAME = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n"
FAILED = "failed"


class ImagesForm(Form):
    """Images, all of which are told together."""

    def __init__(self) -> None:
        self._whole: Images | None = None

    def add(self, value: Any) -> bytes:
        said: Images = converted(value, Images)
        for image in said.data:
            if (image.url.__class__ is str) is (image.b64_json.__class__ is str):
                raise Unknown("the worker's image has no url and no b64_json, or both")
        if self._whole is not None:
            said.data = [*self._whole.data, *said.data]
        self._whole = said
        return b""

    def end(self) -> Whole:
        if self._whole is None:
            raise StreamIncomplete("the worker ended its stream without an image")
        return Whole(json_encode(self._whole))


class SpeechForm(Form):
    """A sound in pieces, as bytes or as events; or where it is to be found."""

    def __init__(self, *, as_events: bool = False) -> None:
        self._as_events = as_events
        self._has_begun = False
        self._links: Clips | None = None

    def add(self, value: Any) -> bytes:
        said: Clips = converted(value, Clips)
        if said.status == FAILED:
            if self._has_begun:
                raise Unknown(f"the worker failed: {said.error}")
            self.refusal = Whole(json_encode(said), status=400)
            return b""
        pieces = [b"" if clip.url is not None else bytes_of(clip) for clip in said.data]
        if any(clip.url is not None for clip in said.data):
            said.data = [*(self._links.data if self._links is not None else ()), *said.data]
            self._links = said
            return b""
        if not self._has_begun and said.data and not self._as_events:
            name = said.data[0].output_format.lower()
            self.media = AUDIO_TYPES.get(name, b"audio/" + _word(name))
        sound = b"".join(pieces)
        self._has_begun = self._has_begun or bool(sound)
        if not self._as_events:
            return sound
        return b"".join(
            b"data: " + json_encode({"type": "speech.audio.delta", "audio": clip.b64_json}) + b"\n\n"
            for clip in said.data
        )

    def end(self) -> Whole | bytes:
        if self._links is not None:
            if self._has_begun:
                raise Unknown("the worker answered with a sound and a link")
            return Whole(json_encode(self._links))
        if not self._has_begun:
            raise Unknown("the worker ended its stream without a sound")
        return b'data: {"type":"speech.audio.done"}\n\n' if self._as_events else b""

    def failure(self, error: ErrorAnswer) -> bytes | None:
        """Bytes have no place for an error: the connection breaks off."""
        return error.event() if self._as_events else None


class VideosForm(Form):
    """Films, told together; what is under way is told by the last."""

    def __init__(self) -> None:
        self._whole: Clips | None = None

    def add(self, value: Any) -> bytes:
        said: Clips = converted(value, Clips)
        if self._whole is not None:
            said.data = [*self._whole.data, *said.data]
        self._whole = said
        return b""

    def end(self) -> Whole:
        if self._whole is None:
            raise StreamIncomplete("the worker ended its stream without an answer")
        return Whole(json_encode(self._whole))


class VideoEventsForm(Form):
    """A film's progress, each step an event."""

    def __init__(self) -> None:
        self._has_begun = False

    def add(self, value: Any) -> bytes:
        said: Clips = converted(value, Clips)
        self._has_begun = True
        return b"data: " + json_encode(said) + b"\n\n"

    def end(self) -> bytes:
        if not self._has_begun:
            raise StreamIncomplete("the worker ended its stream without an answer")
        return DONE


class FramesForm(Form):
    """A film as it is made: one JPEG after another, each in the place of the last."""

    media = b"multipart/x-mixed-replace; boundary=frame"

    def __init__(self) -> None:
        self._has_begun = False

    def add(self, value: Any) -> bytes:
        said: Clips = converted(value, Clips)
        if said.status == FAILED:
            raise Unknown(f"the worker failed: {said.error}")
        frames = [bytes_of(clip) for clip in said.data]
        self._has_begun = self._has_begun or bool(frames)
        return b"".join(FRAME % (len(frame), frame) for frame in frames)

    def end(self) -> bytes:
        if not self._has_begun:
            raise Unknown("the worker ended its stream without a frame")
        return b""

    def failure(self, error: ErrorAnswer) -> bytes | None:
        """Frames have no place for an error: the connection breaks off."""
        return None


def bytes_of(clip: Clip) -> bytes:
    """What a piece holds. Raises `Unknown` for one that holds nothing."""
    try:
        return b64decode(clip.b64_json if clip.b64_json is not None else "?", validate=True)
    except (binascii.Error, ValueError):
        raise Unknown("the worker's piece has no b64_json that can be read") from None


def _word(name: str) -> bytes:
    """The name of a format, fit for a header. Raises `Unknown`."""
    if not (name.isascii() and name.replace("-", "").replace(".", "").isalnum()):
        raise Unknown(f"the worker's output_format is {name!r}")
    return name.encode("ascii")
