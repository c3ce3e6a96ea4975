"""Image generation."""

from typing import Any

from dynamo.common.protocols.models import BaseModel


class ImageNvExt(BaseModel):
    """Extensions of a request."""

    annotations: list[str] | None = None
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None


class NvCreateImageRequest(BaseModel):
    """Request for images; `input_reference` is an image to start from, `size` is WIDTHxHEIGHT."""

    extra_args: dict[str, Any] | None = None
    prompt: str
    model: str | None = None
    n: int | None = None
    quality: str | None = None
    response_format: str | None = None
    size: str | None = None
    style: str | None = None
    user: str | None = None
    moderation: str | None = None
    input_reference: str | None = None
    nvext: ImageNvExt | None = None


class ImageData(BaseModel):
    """One image, by URL or as base64."""

    url: str | None = None
    b64_json: str | None = None
    revised_prompt: str | None = None


class NvImagesResponse(BaseModel):
    """Generated images."""

    created: int
    data: list[ImageData] = []  # noqa: RUF012 -- pydantic copies it
    background: str | None = None
    output_format: str | None = None
    size: str | None = None
    quality: str | None = None
    usage: dict[str, Any] | None = None
