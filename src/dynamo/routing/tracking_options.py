"""TrackingOptions: by which hashes routers know each other's requests under way (serving-plane.md §4.6)."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.kv_router.tracking import KEYED, PUBLIC, TrackingKey, check_tracking, read_key


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the options of those who route.
class TrackingOptions:
    """Hashes of the requests that routers track."""

    tracking_hash: str = option(
        PUBLIC,
        "--router-tracking-hash",
        "DYN_ROUTER_TRACKING_HASH",
        "By which hashes routers know requests under way: those that anybody can compute, or those of who has the key",
        choices=[PUBLIC, KEYED],
    )
    tracking_key_file: str | None = option(
        None,
        "--router-tracking-key-file",
        "DYN_ROUTER_TRACKING_KEY_FILE",
        "With keyed-xxh3-v1: file with the key, 32 bytes as they are",
    )
    tracking_key_id: str | None = option(
        None, "--router-tracking-key-id", "DYN_ROUTER_TRACKING_KEY_ID", "With keyed-xxh3-v1: the name of the key"
    )

    def check_tracking(self) -> None:
        """Raises `ConfigError` for flags that do not go together."""
        check_tracking(self.tracking_hash, self.tracking_key_file, self.tracking_key_id)

    def tracking_key(self) -> TrackingKey | None:
        """The key, if there is one. Raises `ConfigError` where it cannot be read."""
        if self.tracking_hash != KEYED:
            return None
        return read_key(self.tracking_key_file or "", self.tracking_key_id or "")
