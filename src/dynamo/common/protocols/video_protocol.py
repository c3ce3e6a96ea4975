"""Video generation."""

from typing import Any, Literal

from dynamo.common.protocols.models import BaseModel


class VideoNvExt(BaseModel):
    """Extensions of a request; `num_frames` overrides `fps` times seconds."""

    annotations: list[str] | None = None
    fps: int | None = None
    num_frames: int | None = None
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    boundary_ratio: float | None = None
    guidance_scale_2: float | None = None


class NvCreateVideoRequest(BaseModel):
    """Request for a video; `input_reference` is an image to start from, `size` is WIDTHxHEIGHT."""

    extra_args: dict[str, Any] | None = None
    prompt: str
    model: str
    input_reference: str | None = None
    seconds: int | None = None
    size: str | None = None
    user: str | None = None
    response_format: Literal["url", "b64_json"] | None = None
    output_format: str | None = None
    stream: bool | None = None
    nvext: VideoNvExt | None = None


class VideoData(BaseModel):
    """One video, by URL or as base64; `output_format` is its container."""

    output_format: str
    url: str | None = None
    b64_json: str | None = None
    fps: int | None = None
    audio_sample_rate: int | None = None


class NvVideosResponse(BaseModel):
    """Generated videos."""

    id: str
    object: str = "video"
    model: str
    status: str = "completed"
    progress: int = 100
    created: int
    data: list[VideoData] = []  # noqa: RUF012 -- pydantic copies it
    error: str | None = None
    inference_time_s: float | None = None
