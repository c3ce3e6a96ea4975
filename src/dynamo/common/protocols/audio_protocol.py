"""Speech and audio generation."""

from typing import Any, Literal

from dynamo.common.protocols.models import BaseModel, Field


class AudioNvExt(BaseModel):
    """Extensions of a request."""

    annotations: list[str] | None = None
    frontend_accepts_audio_chunks: bool | None = None
    cfg_scale: float | None = None


class NvCreateAudioSpeechRequest(BaseModel):
    """Request for speech; `ref_audio` and `ref_text` are a voice to imitate, `response_format` is the codec."""

    extra_args: dict[str, Any] | None = None
    input: str
    model: str | None = None
    voice: str | None = None
    data_source: Literal["url", "b64_json"] | None = None
    response_format: str | None = None
    speed: float | None = Field(default=None, ge=0.25, le=4.0)
    task_type: str | None = None
    language: str | None = None
    instructions: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    max_new_tokens: int | None = None
    user: str | None = None
    nvext: AudioNvExt | None = None


class AudioData(BaseModel):
    """One recording, by URL or as base64; `output_format` is its codec."""

    output_format: str
    url: str | None = None
    b64_json: str | None = None


class NvAudioSpeechResponse(BaseModel):
    """Generated audio."""

    id: str
    object: str = "audio.speech"
    model: str
    status: str = "completed"
    progress: int = 100
    created: int
    data: list[AudioData] = []  # noqa: RUF012 -- pydantic copies it
    error: str | None = None
    inference_time_s: float | None = None
