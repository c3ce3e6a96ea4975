"""TrackingOptions: the hash function by which routers exchange active requests."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.kv_router.tracking import KEYED, PUBLIC, TrackingKey, check_tracking, read_key


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the options of the routers.
class TrackingOptions:
    """Hashes of active requests."""

    tracking_hash: str = option(
        PUBLIC,
        "--router-tracking-hash",
        "DYN_ROUTER_TRACKING_HASH",
        "Hash of active requests' blocks, exchanged between routers: public, or with a secret key",
        choices=[PUBLIC, KEYED],
    )
    tracking_key_file: str | None = option(
        None,
        "--router-tracking-key-file",
        "DYN_ROUTER_TRACKING_KEY_FILE",
        "File with the 32-byte binary key of keyed-xxh3-v1",
    )
    tracking_key_id: str | None = option(
        None, "--router-tracking-key-id", "DYN_ROUTER_TRACKING_KEY_ID", "Name of the key of keyed-xxh3-v1"
    )

    def check_tracking(self) -> None:
        """Raise `ConfigError` for conflicting flags."""
        check_tracking(self.tracking_hash, self.tracking_key_file, self.tracking_key_id)

    def tracking_key(self) -> TrackingKey | None:
        """Return the key, or None without keyed hashes. Raises `ConfigError` if it cannot be read."""
        if self.tracking_hash != KEYED:
            return None
        return read_key(self.tracking_key_file or "", self.tracking_key_id or "")
