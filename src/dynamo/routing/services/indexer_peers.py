"""Peers: other indexers; at startup their state is loaded from the first one that responds."""

import logging
from collections.abc import Sequence

from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.core.errors import DynamoException, HttpError
from dynamo.core.http_client import Deadlines, HttpClient
from dynamo.routing.services.indexed_models import IndexedModels, ModelDump

logger = logging.getLogger(__name__)

DUMP_S = 60.0  # A dump of millions of blocks takes several seconds to create, send and parse.
DUMP_BYTES_MAX = 4 << 30  # Some 100 bytes for each of the blocks that an index may hold.
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

    async def recover(self, models: IndexedModels) -> bool:
        """Load the dump of the first peer that responds; return False if all are unavailable."""
        for url in list(self._urls):
            try:
                count = await models.load(decode_dump(await fetch(url)))
            except (DynamoException, *UNREADABLE) as error:
                logger.warning("failed to load the dump of peer %s: %s", url, error)
                continue
            logger.info("peer %s: loaded %d events", url, count)
            return True
        return False


async def fetch(url: str) -> bytes:
    """Return the dump of an indexer. Raises `DynamoException`."""
    client = HttpClient(url, Deadlines(DUMP_S, DUMP_S, DUMP_S), setting="peer URL")
    try:
        async with client.request("GET", "/dump") as response:
            if response.status != 200:
                raise HttpError(response.status, "expected a dump")
            return await response.read(DUMP_BYTES_MAX)
    finally:
        client.close()
