"""DynamoMediaConnector: vLLM's fetches of images by `ImageLoader`. Import this module and set `VLLM_MEDIA_CONNECTOR=dynamo`.

Without vLLM the module has no connector.
"""

import functools
from typing import Any

from dynamo.common.http import HttpStatusError
from dynamo.common.http.url_validator import UrlValidationError
from dynamo.common.multimodal.image_loader import ImageLoader

try:
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
except ImportError:
    MEDIA_CONNECTOR_REGISTRY = None

CLIENT_ERRORS = (UrlValidationError, HttpStatusError)
"""Errors that another way of fetching must not avoid."""


@functools.cache
def _get_shared_image_loader() -> ImageLoader:
    """Return the loader of the process."""
    return ImageLoader()


if MEDIA_CONNECTOR_REGISTRY is not None:

    @MEDIA_CONNECTOR_REGISTRY.register("dynamo")
    class DynamoMediaConnector(MediaConnector):  # type: ignore[misc,unused-ignore]
        """vLLM's connector with the images of `ImageLoader`; other media are vLLM's."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._image_loader = _get_shared_image_loader()

        async def fetch_image_async(self, image_url: str, **kwargs: Any) -> Any:
            """Return an image; vLLM fetches what the loader cannot, such as its own schemes."""
            try:
                return await self._image_loader.load_image(image_url)
            except CLIENT_ERRORS:
                raise
            except ValueError:
                return await super().fetch_image_async(image_url, **kwargs)
