"""Transfers of memory between processes by NIXL: readable and writable regions, and operations that use them.

One process offers a region (`Connector.create_readable`, `create_writable`) and sends the operation's metadata; another
one reads or writes it (`begin_read`, `begin_write`). The nixl package is needed by the first connection only.
"""

from dynamo.nixl_connect.connection import Connection, Remote
from dynamo.nixl_connect.connector import Connector
from dynamo.nixl_connect.memory import (
    Descriptor,
    Device,
    DeviceKind,
    OperationKind,
    OperationStatus,
    RdmaMetadata,
    SerializedDescriptor,
)
from dynamo.nixl_connect.operations import (
    AbstractOperation,
    ActiveOperation,
    PassiveOperation,
    ReadableOperation,
    ReadOperation,
    WritableOperation,
    WriteOperation,
)

__all__ = [
    "AbstractOperation",
    "ActiveOperation",
    "Connection",
    "Connector",
    "Descriptor",
    "Device",
    "DeviceKind",
    "OperationKind",
    "OperationStatus",
    "PassiveOperation",
    "RdmaMetadata",
    "ReadOperation",
    "ReadableOperation",
    "Remote",
    "SerializedDescriptor",
    "WritableOperation",
    "WriteOperation",
]
