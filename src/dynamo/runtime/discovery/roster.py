"""Roster: records of a bucket in a remote registry, including records that are missing after an outage.

After an outage, a missing record means that its owner died or that the registry lost data. During a grace period
(`is_patient`) such a record stays in the view, so that its owner can write it again.
"""

from collections.abc import Mapping

from dynamo.runtime.discovery.base import View


class Roster:
    """One bucket as its watchers see it."""

    def __init__(self) -> None:
        self.view = View()
        self.revision = 0
        """Registry revision of the view; 0 when the bucket must be listed."""
        self.missing: set[str] = set()
        """Records that the registry no longer has, kept in the view until the grace period ends."""

    def replace(self, records: Mapping[str, bytes], revision: int, *, is_patient: bool) -> None:
        """Apply a listing."""
        known = self.view.records
        self.missing = {key for key in known if key not in records} if is_patient else set()
        self.view.replace({**{key: known[key] for key in self.missing}, **records})
        self.revision = revision

    def put(self, key: str, value: bytes) -> None:
        self.missing.discard(key)
        self.view.put(key, value)

    def delete(self, key: str, *, is_patient: bool) -> None:
        if is_patient and key in self.view.records:
            self.missing.add(key)
        else:
            self.forget(key)

    def forget(self, key: str) -> None:
        """Remove a record that its owner deleted."""
        self.missing.discard(key)
        self.view.delete(key)

    def forget_missing(self) -> int:
        """Remove the missing records at the end of the grace period; return their number."""
        missing, self.missing = self.missing, set()
        for key in missing:
            self.view.delete(key)
        return len(missing)

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.missing <= self.view.records.keys(), "missing records must be in the view"
