"""Output modalities of a model, and the type of a request for one."""

from enum import Enum
from functools import reduce
from operator import or_
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.llm import ModelType


class OutputModality(Enum):
    """Modality, whose value are the APIs that return it."""

    TEXT = (ModelType.Chat, ModelType.Completions)
    IMAGE = (ModelType.Images, ModelType.Chat)
    VIDEO = (ModelType.Videos,)
    AUDIO = (ModelType.Audios,)

    @classmethod
    def from_name(cls, name: str) -> "OutputModality":
        """Return the modality of a name in any case. Raise `ValueError` if there is none."""
        found = cls.__members__.get(name.upper())
        if found is None:
            raise InvalidArgument(f"output modality {name}: expected one of {', '.join(sorted(cls.valid_names()))}")
        return found

    @classmethod
    def valid_names(cls) -> set[str]:
        """Return the names in lower case."""
        return set(map(str.lower, cls.__members__))


class RequestType(Enum):
    """Type of a request."""

    CHAT_COMPLETION = "chat_completion"
    IMAGE_GENERATION = "image_generation"
    VIDEO_GENERATION = "video_generation"
    AUDIO_GENERATION = "audio_generation"


def get_output_modalities(cli_input: list[str], model_repo: str) -> ModelType | None:
    """Return the APIs of the named modalities; None without a name."""
    types = [one for name in cli_input for one in OutputModality.from_name(name).value]
    return reduce(or_, types) if types else None


def parse_request_type(raw_request: dict[str, Any], output_modalities: list[str]) -> tuple[Any, RequestType]:
    """Return the request, parsed where it is for media, and its type, by the first modality of the worker."""
    if not output_modalities:
        raise InvalidArgument("output_modalities is empty: expected at least one")
    modality = OutputModality.from_name(output_modalities[0])
    is_chat = modality is OutputModality.IMAGE and "messages" in raw_request
    if is_chat or modality is OutputModality.TEXT:
        return raw_request, RequestType.CHAT_COMPLETION
    kind = RequestType(f"{modality.name.lower()}_generation")
    return _protocol(modality)(**raw_request), kind


def _protocol(modality: OutputModality) -> type[Any]:
    """Return the class of requests for a modality. Imported here: it needs pydantic, which text workers do not."""
    from dynamo.common.protocols import audio_protocol, image_protocol, video_protocol

    return {
        OutputModality.AUDIO: audio_protocol.NvCreateAudioSpeechRequest,
        OutputModality.IMAGE: image_protocol.NvCreateImageRequest,
        OutputModality.VIDEO: video_protocol.NvCreateVideoRequest,
    }[modality]
