"""Tiers: open the configured tiers: host memory, disk file, object store, and the book of them."""

import logging
from dataclasses import dataclass

from dynamo.core.errors import ConfigError
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import Tier
from dynamo.kvbm.logical.book import Book
from dynamo.kvbm.logical.eviction import make_inactive
from dynamo.kvbm.logical.frequency import RepeatFilter, Sketch
from dynamo.kvbm.logical.policies import Policy, Rule
from dynamo.kvbm.logical.pool import Pool
from dynamo.kvbm.physical.disk import Disk, DiskFull
from dynamo.kvbm.physical.host import HostArena
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.physical.objects import LocalObjects, ObjectBlocks, ObjectStore
from dynamo.kvbm.physical.s3 import Credentials, S3Objects
from dynamo.kvbm.transfer.shared import SharedMemoryPages, is_available

logger = logging.getLogger(__name__)

STATIONS = 256  # Host slots without a host tier: staging buffers for copies from and to slower tiers.
QUEUE_SHARE = 2  # At most one in this many host blocks waits for its copy, during which it cannot be evicted.
QUEUE_MAX = 4096


@dataclass(slots=True)
class BlockTiers:
    """All tiers below the device."""

    book: Book
    host: HostArena
    disk: Disk | None
    objects: ObjectBlocks | None
    pages: SharedMemoryPages | None
    """The host tier's memory, where peers may map it."""


def open_tiers(
    config: KvbmConfig, layout: BlockLayout, *, worker_id: str = "", store: ObjectStore | None = None
) -> BlockTiers:
    """Open the tiers. Raise `ConfigError` for invalid settings; a disk without space is logged and not used."""
    wanted = config.host_blocks(layout.stride_bytes)
    blocks = wanted or STATIONS
    sketch = Sketch(blocks)
    host = Pool(blocks, make_inactive(config.eviction, sketch), is_keeping=wanted > 0)
    lower: dict[Tier, Pool] = {}
    policies: dict[Tier, Policy] = {}
    disk = _open_disk(config, layout)
    if disk is not None:
        lower[Tier.DISK] = Pool(disk.blocks, make_inactive(config.eviction, sketch))
        repeats = RepeatFilter() if config.disk_filter else None
        policies[Tier.DISK] = Policy(config.to_disk, sketch, lfu_min=config.to_disk_lfu_min, repeats=repeats)
    objects: ObjectBlocks | None = None
    if config.object_enabled:
        found = store or open_store(config, worker_id)
        objects = ObjectBlocks(found, layout, config.object_timeout_s)
        lower[Tier.OBJECT] = Pool(config.object_blocks, make_inactive("lfu", sketch))
        repeats = None if config.object_write_through else RepeatFilter()
        policies[Tier.OBJECT] = Policy((Rule.PRESENCE,), sketch, repeats=repeats)
    book = Book(
        host,
        lower,
        to_host=Policy(config.to_host, sketch, lfu_min=config.to_host_lfu_min),
        to_lower=policies,
        sketch=sketch,
        queue_max=max(1, min(QUEUE_MAX, blocks // QUEUE_SHARE)),
        priority_min=config.host_priority_min,
    )
    if disk is not None:
        _restore(disk, lower[Tier.DISK])
    pages = SharedMemoryPages(blocks * layout.stride_bytes) if config.has_peers and is_available() else None
    return BlockTiers(book, HostArena(layout, blocks, None if pages is None else pages.array), disk, objects, pages)


def reopen_disk(config: KvbmConfig, layout: BlockLayout, book: Book) -> Disk | None:
    """Open the disk tier of another model, in place of one whose pool is empty. Raise `ConfigError`."""
    disk = _open_disk(config, layout)
    if disk is None:
        book.paused.add(Tier.DISK)
    else:
        _restore(disk, book.lower[Tier.DISK])
    return disk


def _restore(disk: Disk, pool: Pool) -> None:
    kept = disk.restore()
    pool.restore(kept)
    if kept:
        logger.info("%s: restored %d blocks", disk.path, len(kept))


def open_store(config: KvbmConfig, worker_id: str) -> ObjectStore:
    """Open a directory or an S3 bucket. Raise `ConfigError`."""
    bucket = config.object_bucket.replace("{worker_id}", worker_id)
    endpoint = config.object_endpoint
    if endpoint.startswith("file://"):
        path = endpoint.removeprefix("file://")
        return LocalObjects(f"{path.rstrip('/')}/{bucket}" if bucket else path)
    if not endpoint:
        endpoint = f"https://s3.{config.object_region}.amazonaws.com"
    credentials = Credentials(config.object_access_key, config.object_secret_key, config.object_region)
    return S3Objects(endpoint, bucket, credentials)


def _open_disk(config: KvbmConfig, layout: BlockLayout) -> Disk | None:
    blocks = config.disk_blocks_of(layout.stride_bytes)
    if not blocks:
        return None
    try:
        return Disk(
            config.disk_dir,
            layout,
            blocks,
            is_direct=config.disk_direct,
            fills_with_zeros=config.disk_zerofill,
            syncs=config.disk_fsync,
        )
    except DiskFull as error:
        logger.warning("disk tier disabled: %s", error)
        return None
    except OSError as error:
        raise ConfigError(f"DYN_KVBM_DISK_CACHE_DIR={config.disk_dir!r}: {error.strerror}") from None
