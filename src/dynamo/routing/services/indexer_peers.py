"""Peers: other indexers; at the start the first that answers is asked for all that it knows (serving-plane.md §4.12)."""

import logging
import urllib.request
from collections.abc import Sequence

from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.core.errors import HttpError
from dynamo.core.threads import in_daemon_thread
from dynamo.routing.services.indexed_models import IndexedModels, ModelDump

logger = logging.getLogger(__name__)

DUMP_S = 60.0  # A dump of millions of blocks takes some seconds to make, send and read.
PEERS_MAX = 256
URL_SCHEMES = ("http://", "https://")

decode_dump = json_decoder(dict[str, ModelDump]).decode


class Peers:
    """Other indexers, by URL."""

    def __init__(self, urls: Sequence[str] = ()) -> None:
        self._urls: list[str] = []
        for url in urls:
            self.add(url)

    @property
    def urls(self) -> list[str]:
        """In order."""
        return sorted(self._urls)

    def add(self, url: str) -> None:
        """One more; naming it again changes nothing. Raises `HttpError` for what is no URL."""
        if not url.startswith(URL_SCHEMES):
            raise HttpError(400, f"invalid peer URL `{url}`: expected http://host:port")
        if url not in self._urls:
            if len(self._urls) >= PEERS_MAX:
                raise HttpError(409, f"there are {PEERS_MAX} peers already")
            self._urls.append(url)

    def remove(self, url: str) -> bool:
        """One less; False where it was none."""
        if url not in self._urls:
            return False
        self._urls.remove(url)
        return True

    async def recover(self, models: IndexedModels) -> None:
        """What the first peer that answers knows, is known from now on. Nobody need answer."""
        for url in list(self._urls):
            try:
                text = await in_daemon_thread(lambda url=url: fetch(url), f"dump of {url}")  # type: ignore[misc]
                count = await models.load(decode_dump(text))
            except (OSError, *UNREADABLE) as error:
                logger.warning("peer %s does not say what it knows: %s", url, error)
                continue
            logger.info("peer %s told %d events", url, count)
            return


def fetch(url: str) -> bytes:
    """The dump of an indexer. Raises `OSError`."""
    with urllib.request.urlopen(url.rstrip("/") + "/dump", timeout=DUMP_S) as answer:  # noqa: S310 - checked by `add`
        body: bytes = answer.read()
    return body
