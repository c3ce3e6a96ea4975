"""Transfers of memory between processes by NIXL: readable and writable regions, and operations that use them.

One process offers a region (`Connector.create_readable`, `create_writable`) and sends the operation's metadata; another
one reads or writes it (`begin_read`, `begin_write`). The nixl package is needed by the first connection only.
"""

from importlib import import_module
from typing import Any

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

_NIXL_MODULES = {"nixl_api": "nixl._api", "nixl_bindings": "nixl._bindings"}


def __getattr__(name: str) -> Any:
    """Return a module of the nixl package, imported at its first use."""
    if name not in _NIXL_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(_NIXL_MODULES[name])
    except ImportError as error:
        raise AttributeError(f"{name} requires NIXL: pip install nixl ({error})") from None
