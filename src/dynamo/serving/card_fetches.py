"""CardFetches: tasks that fetch the files of model cards from their workers, until the cards can be served."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from dynamo.core.backoff import Backoff
from dynamo.core.errors import DynamoException
from dynamo.core.tasks import TaskOwner
from dynamo.core.threads import in_daemon_thread
from dynamo.model_card.asset_cache import AssetCache
from dynamo.model_card.assets import has_remote
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord
from dynamo.serving.served_model import PARTIAL

logger = logging.getLogger("dynamo.serving.models")  # `core.logging` gives it upstream's name.

FETCH_FIRST_S, FETCH_MAX_S = 0.2, 30.0  # Delays between attempts to fetch a card's files from an unavailable worker.
FETCHES_MAX = 8  # Concurrent fetches: more than there are models that hang at once, fewer than would saturate the link.


def needs_files(card: ModelDeploymentCard) -> bool:
    """Return whether the frontend needs files that are on the card's worker."""
    return card.model_input != "Text" and card.worker_type not in PARTIAL and has_remote(card)


class CardFetches:
    """Fetches in progress, by discovery key."""

    def __init__(
        self,
        assets: AssetCache,
        tasks: TaskOwner,
        applying: asyncio.Lock,
        apply: Callable[[str, ModelRecord, str], Awaitable[None]],
    ) -> None:
        """`apply` is called with key, record and checksum once the files are there, with the lock `applying` held."""
        self._assets = assets
        self._tasks = tasks
        self._applying = applying
        self._apply = apply
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._records: dict[str, ModelRecord] = {}
        self._slots = asyncio.Semaphore(FETCHES_MAX)

    @property
    def keys(self) -> Iterable[str]:
        """Return the discovery keys of the cards that are being fetched."""
        return self._fetches.keys()

    @property
    def records(self) -> Iterable[ModelRecord]:
        """Return the records of these cards."""
        return self._records.values()

    def start(self, key: str, record: ModelRecord, checksum: str) -> None:
        """Start to fetch a card's files."""
        work = self._fetch(key, record, checksum)
        self._fetches[key] = self._tasks.start(work, f"files of {record.card_json.display_name}")
        self._records[key] = record

    def stop(self, key: str) -> None:
        """Stop the fetch of a key, if any."""
        fetch = self._fetches.pop(key, None)
        if fetch is not None:
            del self._records[key]
            fetch.cancel()

    async def wait(self, timeout_s: float) -> None:
        """Return when the present fetches are complete, or after the timeout."""
        if self._fetches:
            await asyncio.wait(set(self._fetches.values()), timeout=timeout_s)

    async def _fetch(self, key: str, record: ModelRecord, checksum: str) -> None:
        """Fetch the card's files, retrying until they are available, and then apply the record."""
        name, backoff = record.card_json.display_name, Backoff(FETCH_FIRST_S, FETCH_MAX_S)
        while True:
            try:
                async with self._slots:
                    await in_daemon_thread(partial(self._assets.localise, record.card_json), f"files of {name}")
                break
            except DynamoException as error:
                logger.warning("model %s: failed to fetch its files: %s", name, error)
            await asyncio.sleep(backoff.next(random.random()))
        async with self._applying:
            if self._fetches.get(key) is asyncio.current_task():
                del self._fetches[key], self._records[key]
                await self._apply(key, record, checksum)
