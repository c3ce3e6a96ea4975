"""Transfers: passive ones offer a region, active ones read or write a region of another process."""

import asyncio
import uuid
from abc import ABC, abstractmethod
from typing import Any, Self

from dynamo.nixl_connect.connection import Connection, Remote, encode_metadata
from dynamo.nixl_connect.memory import Descriptor, OperationKind, OperationStatus, RdmaMetadata

POLL_MS = (5.0, 100.0)  # NIXL reports no completion by itself.
BACKOFF = 1.5
FINAL = (OperationStatus.COMPLETE, OperationStatus.CANCELLED, OperationStatus.ERRORED)

Descriptors = Descriptor | list[Descriptor]


def as_list(descriptors: Any, what: str) -> list[Descriptor]:
    """Return descriptors as a list. Raise `TypeError` for anything else, `ValueError` for none."""
    found = descriptors if isinstance(descriptors, list) else [descriptors]
    if not all(isinstance(one, Descriptor) for one in found):
        raise TypeError(f"{what} must be Descriptor or list[Descriptor]")
    if not found:
        raise ValueError(f"{what} must not be an empty list")
    if len({one.device.kind for one in found}) > 1:
        raise ValueError(f"{what}: all must have the same memory type")
    return found


class AbstractOperation(ABC):
    """A transfer with local regions, which are registered until its release."""

    def __init__(
        self,
        connection: Connection,
        operation_kind: OperationKind,
        local_descriptors: Descriptors,
        remote_descriptors: Descriptors | None,
        notification_key: str | None,
    ) -> None:
        self._local: list[Descriptor] = []
        self._status = OperationStatus.UNINITIALIZED
        if not isinstance(connection, Connection):
            raise TypeError("connection must be Connection")
        if operation_kind not in (OperationKind.READ, OperationKind.WRITE):
            raise ValueError("operation_kind must be READ or WRITE")
        if notification_key == "":
            raise ValueError("notification_key must not be empty")
        local = as_list(local_descriptors, "local_descriptors")
        self._remote_list = None if remote_descriptors is None else as_list(remote_descriptors, "remote_descriptors")
        self._connection = connection
        self._operation_kind = operation_kind
        self._notification_key = notification_key or str(uuid.uuid4())
        for one in local:
            one.register_with_connector(connection)
            self._local.append(one)

    def __del__(self) -> None:
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(kind={self._operation_kind}, local={self._local}, status={self._status})"

    def _release(self) -> None:
        for one in self._local:
            if one.is_registered:
                one.deregister_with_connector(self._connection)

    @property
    def connection(self) -> Connection:
        """The local agent."""
        return self._connection

    @property
    def operation_kind(self) -> OperationKind:
        """Direction of the transfer."""
        return self._operation_kind

    @property
    @abstractmethod
    def status(self) -> OperationStatus:
        """State of the transfer, queried from NIXL."""

    async def wait_for_completion(self) -> None:
        """Wait until the transfer ends. Raise `RuntimeError` if it fails."""
        pause_ms, longest_ms = POLL_MS
        while self.status not in FINAL:
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(pause_ms * BACKOFF, longest_ms)
        if self._status is OperationStatus.ERRORED:
            raise RuntimeError(f"NIXL transfer failed: {self!r}; the other process may have ended")


class ActiveOperation(AbstractOperation):
    """A transfer that this process performs."""

    def __init__(
        self,
        remote: Remote,
        operation_kind: OperationKind,
        local_descriptors: Descriptors,
        remote_descriptors: Descriptors,
        notification_key: str,
    ) -> None:
        self._local = []
        self._handle: Any = None
        if not isinstance(remote, Remote):
            raise TypeError("remote must be Remote")
        local = as_list(local_descriptors, "local_descriptors")
        others = as_list(remote_descriptors, "remote_descriptors")
        if [one.size for one in local] != [one.size for one in others]:
            raise ValueError("local_descriptors and remote_descriptors must have the same number and sizes")
        self._remote = remote
        super().__init__(remote.connection, operation_kind, local, others, notification_key)
        self._local_descriptors = local
        nixl = self._connection._nixl
        lists = [
            nixl.get_xfer_descs(
                [(one.ptr, one.size, one.device.id) for one in side], mem_type=side[0].device.kind.nixl_mem_type
            )
            for side in (local, others)
        ]
        self._handle = nixl.initialize_xfer(str(operation_kind), *lists, remote.name, self._notification_key.encode())

    def __exit__(self, *_: object) -> None:
        if self._status not in FINAL and self.status not in FINAL:
            self._status = OperationStatus.CANCELLED
        self._release()

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        try:
            if handle is not None:
                self._connection._nixl.release_xfer_handle(handle)
        finally:
            super()._release()

    @property
    def remote(self) -> Remote:
        """The agent of the other process."""
        return self._remote

    @property
    def status(self) -> OperationStatus:
        """State of the transfer; the first query starts it."""
        if self._status in FINAL:
            return self._status
        if self._handle is None:
            raise RuntimeError("the transfer is released")
        nixl = self._connection._nixl
        is_new = self._status is OperationStatus.UNINITIALIZED
        state = (
            nixl.transfer(self._handle, self._notification_key.encode())
            if is_new
            else nixl.check_xfer_state(self._handle)
        )
        otherwise = OperationStatus.INITIALIZED if is_new else OperationStatus.IN_PROGRESS
        ends = {"ERR": OperationStatus.ERRORED, "DONE": OperationStatus.COMPLETE}
        self._status = ends.get(state, otherwise)
        return self._status

    def cancel(self) -> None:
        """End the transfer. Raise `RuntimeError` if it has failed."""
        if self._handle is None:
            return
        if self.status is OperationStatus.ERRORED:
            raise RuntimeError("a failed transfer cannot be cancelled")
        handle, self._handle = self._handle, None
        self._connection._nixl.release_xfer_handle(handle)
        self._status = OperationStatus.CANCELLED


def _remote_of(connection: Connection, metadata: RdmaMetadata, kind: OperationKind) -> Remote:
    if not isinstance(metadata, RdmaMetadata):
        raise TypeError("remote_metadata must be RdmaMetadata")
    if metadata.operation_kind != kind:
        raise ValueError(f"remote_metadata must be of kind {kind}")
    return Remote(connection, metadata.nixl_metadata)


class ReadOperation(ActiveOperation):
    """A transfer from a readable region of another process."""

    def __init__(self, connection: Connection, remote_metadata: RdmaMetadata, local_descriptors: Descriptors) -> None:
        self._local, self._handle = [], None
        remote = _remote_of(connection, remote_metadata, OperationKind.READ)
        key, others = remote_metadata.notification_key, remote_metadata.to_descriptors()
        super().__init__(remote, OperationKind.READ, local_descriptors, others, key)

    def results(self) -> list[Descriptor]:
        """Return the local regions. Raise `RuntimeError` before the end."""
        if self._status is not OperationStatus.COMPLETE:
            raise RuntimeError("the operation is not complete; it has no results")
        return self._local_descriptors


class WriteOperation(ActiveOperation):
    """A transfer to a writable region of another process."""

    def __init__(self, connection: Connection, local_descriptors: Descriptors, remote_metadata: RdmaMetadata) -> None:
        self._local, self._handle = [], None
        remote = _remote_of(connection, remote_metadata, OperationKind.WRITE)
        key, others = remote_metadata.notification_key, remote_metadata.to_descriptors()
        super().__init__(remote, OperationKind.WRITE, local_descriptors, others, key)


class PassiveOperation(AbstractOperation):
    """A transfer that another process performs."""

    def __init__(self, connection: Connection, operation_kind: OperationKind, local_descriptors: Descriptors) -> None:
        super().__init__(connection, operation_kind, local_descriptors, None, None)
        self._status = OperationStatus.INITIALIZED

    def metadata(self, hex_encode: bool = False) -> RdmaMetadata:
        """Return what the other process needs; `hex_encode` for receivers that do not accept base64."""
        return RdmaMetadata(
            descriptors=[one.metadata for one in self._local],
            nixl_metadata=encode_metadata(self._connection.metadata, hex_encode),
            notification_key=self._notification_key,
            operation_kind=int(self._operation_kind),
        )

    @property
    def status(self) -> OperationStatus:
        """State of the transfer, which ends with a notification of the other process."""
        if self._status not in FINAL:
            received = self._connection._nixl.update_notifs()
            key = self._notification_key.encode()
            if any(key in messages for messages in received.values()):
                self._status = OperationStatus.COMPLETE
        return self._status


class ReadableOperation(PassiveOperation):
    """A region that another process reads."""

    def __init__(self, connection: Connection, local_descriptors: Descriptors) -> None:
        super().__init__(connection, OperationKind.READ, local_descriptors)


class WritableOperation(PassiveOperation):
    """A region that another process writes."""

    def __init__(self, connection: Connection, local_descriptors: Descriptors) -> None:
        super().__init__(connection, OperationKind.WRITE, local_descriptors)
