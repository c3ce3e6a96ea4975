"""Limits of stored files and batches, without the store itself."""

from msgspec import Struct

BYTES_MAX = 10 << 30  # Fifty inputs of OpenAI's maximum size.
FILES_MAX = 10_000
KEPT_S = 30 * 24 * 3600  # As OpenAI for the files of batches.


class StorageLimits(Struct, frozen=True):
    """Limits on stored data; a request beyond them is refused."""

    bytes_max: int = BYTES_MAX
    files_max: int = FILES_MAX
    open_batches_max: int = 1000
