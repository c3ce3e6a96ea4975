"""Peers: other indexers; at startup their state is loaded from the first one that responds."""

import logging
import urllib.request
from collections.abc import Sequence

from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.core.errors import HttpError
from dynamo.core.threads import in_daemon_thread
from dynamo.routing.services.indexed_models import IndexedModels, ModelDump

logger = logging.getLogger(__name__)

DUMP_S = 60.0  # A dump of millions of blocks takes several seconds to create, send and parse.
PEERS_MAX = 256
URL_SCHEMES = ("http://", "https://")

decode_dump = json_decoder(dict[str, ModelDump]).decode


class Peers:
    """URLs of other indexers."""

    def __init__(self, urls: Sequence[str] = ()) -> None:
        self._urls: list[str] = []
        for url in urls:
            self.add(url)

    @property
    def urls(self) -> list[str]:
        """Return the URLs in order."""
        return sorted(self._urls)

    def add(self, url: str) -> None:
        """Add a URL; adding it again has no effect. Raises `HttpError` for an invalid URL."""
        if not url.startswith(URL_SCHEMES):
            raise HttpError(400, f"invalid peer URL `{url}`: expected http://host:port")
        if url not in self._urls:
            if len(self._urls) >= PEERS_MAX:
                raise HttpError(409, f"cannot add a peer: the maximum of {PEERS_MAX} is reached")
            self._urls.append(url)

    def remove(self, url: str) -> bool:
        """Remove a URL; False if it was not present."""
        if url not in self._urls:
            return False
        self._urls.remove(url)
        return True

    async def recover(self, models: IndexedModels) -> None:
        """Load the dump of the first peer that responds; peers may all be unavailable."""
        for url in list(self._urls):
            try:
                text = await in_daemon_thread(lambda url=url: fetch(url), f"dump of {url}")  # type: ignore[misc]
                count = await models.load(decode_dump(text))
            except (OSError, *UNREADABLE) as error:
                logger.warning("failed to load the dump of peer %s: %s", url, error)
                continue
            logger.info("peer %s: loaded %d events", url, count)
            return


def fetch(url: str) -> bytes:
    """Return the dump of an indexer. Raises `OSError`."""
    with urllib.request.urlopen(url.rstrip("/") + "/dump", timeout=DUMP_S) as answer:  # noqa: S310 - checked by `add`
        body: bytes = answer.read()
    return body
