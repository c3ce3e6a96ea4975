"""Steps that the loaders of audio and video share: the content of a URL, and the items of a request."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from dynamo.common.http import HttpConfigurationError, HttpStatusError
from dynamo.common.http.url_validator import UrlValidationError, describe_media_source
from dynamo.common.multimodal.codec_errors import MissingMediaDecoderError
from dynamo.core.boundaries import ErrorBoundary

logger = logging.getLogger(__name__)

M = TypeVar("M")

URL_VARIANT_KEY = "Url"
DECODED_VARIANT_KEY = "Decoded"

CLIENT_ERRORS = (UrlValidationError, HttpStatusError)
"""Errors that state the HTTP status of the response."""

DEPLOYMENT_ERRORS = (HttpConfigurationError, MissingMediaDecoderError)
"""Errors that are not of the client: a `ValueError` would be one."""

PRECEDENCE = ((asyncio.CancelledError,), CLIENT_ERRORS, DEPLOYMENT_ERRORS, (ValueError,), (Exception,))
"""The error of a request of which several items failed: the first kind of this order."""


async def load_or_reject(kind: str, url: str, load: Callable[[], Awaitable[M]]) -> M:
    """Return loaded media. Raise errors of the client and of the deployment as they are, others as `ValueError`."""
    label = describe_media_source(url)
    found: list[M] = []
    with ErrorBoundary(partial(_reject, kind, label)):
        found.append(await load())
    return found[0]


def _reject(kind: str, label: str, error: Exception) -> NoReturn:
    """Raise `error` or a `ValueError` in its place."""
    if isinstance(error, CLIENT_ERRORS):
        logger.error("URL rejected loading %s: %s: %s", kind, label, error)
        raise error
    if isinstance(error, DEPLOYMENT_ERRORS):
        raise error
    logger.error("failed to load %s from %s", kind, label, exc_info=error)
    raise ValueError(f"Failed to load {kind} from {label}: {error}") from error


async def load_batch(
    kind: str,
    items: Sequence[dict[str, Any]],
    load_url: Callable[[str], Awaitable[M]],
    load_decoded: Callable[[dict[str, Any]], Awaitable[M]] | None,
) -> list[M]:
    """Return the media of a request in its order. `load_decoded` is None if frontends do not decode."""
    loading: list[Callable[[], Awaitable[M]]] = []
    for item in items:
        if URL_VARIANT_KEY in item:
            loading.append(_call(load_url, item[URL_VARIANT_KEY]))
        elif DECODED_VARIANT_KEY not in item:
            raise ValueError(f"Invalid {kind} multimodal item with the keys {sorted(item)}: expected Url or Decoded")
        elif load_decoded is None:
            raise ValueError(f"decoded {kind} cannot be received with enable_frontend_decoding=False")
        else:
            loading.append(_call(load_decoded, item[DECODED_VARIANT_KEY]))
    found = await asyncio.gather(*(load() for load in loading), return_exceptions=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    for kinds in PRECEDENCE:
        for error in errors:
            if isinstance(error, kinds):
                raise error
    return [one for one in found if not isinstance(one, BaseException)]


def _call(load: Callable[[Any], Awaitable[M]], argument: Any) -> Callable[[], Awaitable[M]]:
    return lambda: load(argument)
