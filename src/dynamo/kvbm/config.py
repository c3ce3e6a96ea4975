"""KvbmConfig: the environment variables of the block manager."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dynamo.core.config import environ, read_bool, setting
from dynamo.core.errors import ConfigError
from dynamo.kvbm.logical.policies import Rule

T = TypeVar("T")

GB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KvbmConfig:
    """Tiers, their sizes, and the rules for copying from one tier to the next."""

    cpu_cache_gb: float = 0.0
    cpu_blocks: int | None = None
    disk_cache_gb: float = 0.0
    disk_blocks: int | None = None
    disk_dir: str = "/tmp/"  # noqa: S108 - upstream's default
    disk_zerofill: bool = False
    disk_direct: bool = True
    disk_fsync: bool = False
    """Not in upstream: sync each batch to the medium at once. Blocks lost in a crash are detected by their checksums."""
    disk_filter: bool = True
    host_priority_min: int = 0
    object_enabled: bool = False
    object_bucket: str = ""
    object_endpoint: str = ""
    object_region: str = "us-east-1"
    object_access_key: str = ""
    object_secret_key: str = ""
    object_blocks: int = 100_000
    object_write_through: bool = True
    object_timeout_s: float = 5.0
    """Not in upstream: timeout for one object, in seconds."""
    onboard_timeout_s: float = 2.0
    """Not in upstream: maximum time that a prompt waits for its blocks; blocks still missing then are computed."""
    has_peers: bool = False
    """Not in upstream: let workers copy blocks from each other's host tiers."""
    peer_host: str = ""
    """Not in upstream: address that peers connect to; empty: this machine only, unless TLS verifies clients."""
    transfer_batch: int = 16
    eviction: str = "lru"
    """Not in upstream: eviction policy, `lru`, or `lfu` for upstream's frequency levels."""
    to_host: tuple[Rule, ...] = (Rule.PRESENCE,)
    to_host_lfu_min: int = 1
    to_disk: tuple[Rule, ...] = (Rule.PRESENCE,)
    to_disk_lfu_min: int = 1
    has_events: bool = True
    has_metrics_port: bool = False
    metrics_port: int = 6880

    def __post_init__(self) -> None:
        for name, value in {
            "DYN_KVBM_CPU_CACHE_GB": self.cpu_cache_gb,
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": self.cpu_blocks or 0,
            "DYN_KVBM_DISK_CACHE_GB": self.disk_cache_gb,
            "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": self.disk_blocks or 0,
        }.items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value:g}: must be zero or more")
        if not 0 <= self.host_priority_min <= 100:
            raise ConfigError(f"DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY={self.host_priority_min}: must be 0 to 100")
        for name, count in {
            "DYN_KVBM_OBJECT_NUM_BLOCKS": self.object_blocks,
            "DYN_KVBM_TRANSFER_BATCH_SIZE": self.transfer_batch,
        }.items():
            if count < 1:
                raise ConfigError(f"{name}={count}: must be 1 or more")
        for name, seconds in {
            "DYN_KVBM_OBJECT_TIMEOUT_SECS": self.object_timeout_s,
            "DYN_KVBM_ONBOARD_TIMEOUT_SECS": self.onboard_timeout_s,
        }.items():
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{name}={seconds:g}: must be more than zero")

        if self.has_peers and not (self.cpu_blocks or self.cpu_cache_gb):
            raise ConfigError(
                "DYN_KVBM_PEERS: requires a host tier (set DYN_KVBM_CPU_CACHE_GB), whose blocks peers copy"
            )

    @property
    def is_enabled(self) -> bool:
        """Whether any tier below the device is configured."""
        return bool(
            self.cpu_blocks or self.cpu_cache_gb or self.disk_blocks or self.disk_cache_gb or self.object_enabled
        )

    def host_blocks(self, block_bytes: int) -> int:
        return self.cpu_blocks or int(self.cpu_cache_gb * GB) // block_bytes

    def disk_blocks_of(self, block_bytes: int) -> int:
        return self.disk_blocks or int(self.disk_cache_gb * GB) // block_bytes

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> "KvbmConfig":
        """Return the configuration from the environment. Raise `ConfigError` for an invalid value."""
        known = environ() if variables is None else variables

        def of(name: str, default: T, read: Callable[[str], T]) -> T:
            return setting(f"DYN_KVBM_{name}", default, read, known)

        storage = of("REMOTE_STORAGE_TYPE", "object", _one_of("object", "disk"))
        remote_path = of("REMOTE_DISK_PATH", "", str)
        if storage == "disk" and not remote_path:
            raise ConfigError("DYN_KVBM_REMOTE_STORAGE_TYPE=disk: DYN_KVBM_REMOTE_DISK_PATH must be set too")
        endpoint = of("OBJECT_ENDPOINT", "", str)
        setting("KVBM_ONBOARD_MODE", "inter", _one_of("inter"), known)  # Prompts start after their blocks are loaded.
        return cls(
            cpu_cache_gb=of("CPU_CACHE_GB", 0.0, float),
            cpu_blocks=of("CPU_CACHE_OVERRIDE_NUM_BLOCKS", None, _count),
            disk_cache_gb=of("DISK_CACHE_GB", 0.0, float),
            disk_blocks=of("DISK_CACHE_OVERRIDE_NUM_BLOCKS", None, _count),
            disk_dir=of("DISK_CACHE_DIR", "/tmp/", str),  # noqa: S108
            disk_zerofill=of("DISK_ZEROFILL_FALLBACK", False, read_bool),
            disk_direct=not of("DISK_DISABLE_O_DIRECT", False, read_bool),
            disk_fsync=of("DISK_FSYNC", False, read_bool),
            disk_filter=not of("DISABLE_DISK_OFFLOAD_FILTER", False, read_bool),
            host_priority_min=of("HOST_OFFLOAD_PREFIX_MIN_PRIORITY", 0, int),
            object_enabled=of("OBJECT_ENABLED", False, read_bool) or storage == "disk",
            object_bucket=of("OBJECT_BUCKET", "", str),
            object_endpoint=f"file://{remote_path}" if storage == "disk" else endpoint,
            object_region=of("OBJECT_REGION", "us-east-1", str),
            object_access_key=of("OBJECT_ACCESS_KEY", "", str),
            object_secret_key=of("OBJECT_SECRET_KEY", "", str),
            object_blocks=of("OBJECT_NUM_BLOCKS", 100_000, int),
            object_write_through=of("OBJECT_WRITE_THROUGH", True, read_bool),
            object_timeout_s=of("OBJECT_TIMEOUT_SECS", 5.0, float),
            onboard_timeout_s=of("ONBOARD_TIMEOUT_SECS", 2.0, float),
            has_peers=of("PEERS", False, read_bool),
            peer_host=of("PEER_HOST", "", str),
            transfer_batch=of("TRANSFER_BATCH_SIZE", 16, int),
            eviction=of("EVICTION_POLICY", "lru", _one_of("lru", "lfu")),
            to_host=setting("KVBM_OFFLOAD_G1_TO_G2_POLICIES", (Rule.PRESENCE,), read_rules, known),
            to_host_lfu_min=setting("KVBM_OFFLOAD_G1_TO_G2_PRESENCE_LFU_MIN_LFU_COUNT", 1, int, known),
            to_disk=setting("KVBM_OFFLOAD_G2_TO_G3_POLICIES", (Rule.PRESENCE,), read_rules, known),
            to_disk_lfu_min=setting("KVBM_OFFLOAD_G2_TO_G3_PRESENCE_LFU_MIN_LFU_COUNT", 1, int, known),
            has_events=of("KV_EVENTS_ENABLE_CONSOLIDATOR", True, read_bool),
            has_metrics_port=of("METRICS", False, read_bool),
            metrics_port=of("METRICS_PORT", 6880, int),
        )


def read_rules(text: str) -> tuple[Rule, ...]:
    """Parse a JSON list of rules, or the name of one rule. Raise `ValueError`."""
    names = json.loads(text) if text.strip().startswith(("[", '"')) else text.strip()
    try:
        return tuple(Rule(name) for name in ([names] if isinstance(names, str) else names))
    except ValueError:
        raise ValueError(f"must be one of {', '.join(rule.value for rule in Rule)}") from None


def _count(text: str) -> int | None:
    return int(text) or None


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text

    return read
