"""Connector: the entry point, which begins operations."""

import asyncio
import socket
import uuid
from contextlib import suppress
from functools import cached_property
from types import NoneType
from typing import Any

from dynamo.nixl_connect.connection import Connection
from dynamo.nixl_connect.memory import OperationKind, RdmaMetadata
from dynamo.nixl_connect.operations import (
    Descriptors,
    ReadableOperation,
    ReadOperation,
    WritableOperation,
    WriteOperation,
    as_list,
)


class Connector:
    """Operations of one worker, which share a NIXL agent that is created with the first of them."""

    def __init__(self, worker_id: str | None = None) -> None:
        if worker_id == "" or not isinstance(worker_id, str | NoneType):
            raise TypeError(f"worker_id {worker_id!r}: expected text, or None for a generated one")
        self._name = worker_id or uuid.uuid4().hex
        self._hostname = socket.gethostname()
        self._lock = asyncio.Lock()
        self._connection: Connection | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Connector) and self._name == other._name

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(worker_id={self._name!r}, hostname={self._hostname})"

    def __str__(self) -> str:
        return self._name

    @property
    def hostname(self) -> str:
        """Name of the host."""
        return self._hostname

    @property
    def name(self) -> str | None:
        """Id of the worker."""
        return self._name

    @cached_property
    def is_cuda_available(self) -> bool:
        """Whether CuPy is installed and has a device."""
        with suppress(ImportError, RuntimeError):  # CUDA's errors are RuntimeErrors.
            import cupy

            return bool(cupy.cuda.is_available())
        return False

    async def begin_read(self, remote_metadata: RdmaMetadata, local_descriptors: Descriptors) -> ReadOperation:
        """Begin to read a region of another process."""
        self._check(remote_metadata, local_descriptors, OperationKind.READ)
        return ReadOperation(await self._create_connection(), remote_metadata, local_descriptors)

    async def begin_write(self, local_descriptors: Descriptors, remote_metadata: RdmaMetadata) -> WriteOperation:
        """Begin to write a region of another process."""
        self._check(remote_metadata, local_descriptors, OperationKind.WRITE)
        return WriteOperation(await self._create_connection(), local_descriptors, remote_metadata)

    async def create_readable(self, local_descriptors: Descriptors) -> ReadableOperation:
        """Offer a region that another process may read."""
        return ReadableOperation(await self._create_connection(), local_descriptors)

    async def create_writable(self, local_descriptors: Descriptors) -> WritableOperation:
        """Offer a region that another process may write."""
        return WritableOperation(await self._create_connection(), local_descriptors)

    async def initialize(self) -> None:
        """Return at once: the first operation creates the agent."""

    @staticmethod
    def _check(remote_metadata: Any, local_descriptors: Any, kind: OperationKind) -> None:
        if not isinstance(remote_metadata, RdmaMetadata):
            raise TypeError("remote_metadata must be RdmaMetadata")
        as_list(local_descriptors, "local_descriptors")
        if remote_metadata.operation_kind != kind:
            raise RuntimeError(f"the remote region is not offered for {kind}")

    async def _create_connection(self) -> Connection:
        """Return the connection, which is created with the first operation."""
        async with self._lock:
            self._connection = self._connection or Connection(self, 1)
        return self._connection
