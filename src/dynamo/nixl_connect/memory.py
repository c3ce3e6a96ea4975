"""Memory of a transfer: devices, regions, and their serialized forms."""

import re
import sys
from enum import IntEnum
from typing import Any

import numpy as np

try:
    from pydantic import BaseModel, ConfigDict, field_validator
except ImportError:
    raise ImportError("dynamo.nixl_connect requires pydantic: pip install pydantic") from None


class DeviceKind(IntEnum):
    """Kind of memory."""

    UNSPECIFIED = 0
    HOST = 1
    CUDA = 2
    XPU = 3

    def __str__(self) -> str:
        return {1: "cpu", 2: "cuda", 3: "xpu"}.get(self.value, "<invalid>")

    @property
    def nixl_mem_type(self) -> str:
        """NIXL's name of the memory type."""
        return "DRAM" if self is DeviceKind.HOST else "VRAM"


class OperationKind(IntEnum):
    """Direction of a transfer, from the caller's side."""

    UNSPECIFIED = 0
    READ = 1
    WRITE = 2

    def __str__(self) -> str:
        return {1: "READ", 2: "WRITE"}.get(self.value, "<invalid>")


class OperationStatus(IntEnum):
    """State of a transfer."""

    UNINITIALIZED = 0
    INITIALIZED = 1
    IN_PROGRESS = 2
    COMPLETE = 3
    CANCELLED = 4
    ERRORED = 5

    def __str__(self) -> str:
        return {1: "INIT", 2: "PROC", 3: "DONE", 4: "STOP", 5: "ERR"}.get(self.value, "<invalid>")


class Device:
    """A device: `cpu`, `cuda:N`, `xpu:N`, or a tuple of kind and number."""

    def __init__(self, metadata: str | tuple[DeviceKind, int]) -> None:
        if metadata is None:
            raise ValueError("metadata cannot be None")
        if isinstance(metadata, tuple):
            if len(metadata) != 2 or not isinstance(metadata[0], DeviceKind) or not isinstance(metadata[1], int):
                raise TypeError(f"metadata {metadata!r}: must be a tuple of DeviceKind and int")
            self._kind, self._id = metadata
            return
        if not isinstance(metadata, str):
            raise TypeError(f"metadata {metadata!r}: must be str or a tuple of DeviceKind and int")
        name, _, number = metadata.strip().lower().partition(":")
        kinds = {"cuda": DeviceKind.CUDA, "gpu": DeviceKind.CUDA, "xpu": DeviceKind.XPU}
        if name in ("cpu", "host"):
            self._kind, self._id = DeviceKind.HOST, 0
        elif name in kinds:
            self._kind, self._id = kinds[name], int(number or 0)
        else:
            raise ValueError(f"metadata {metadata!r}: must be cpu, cuda:N or xpu:N")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(kind={self._kind}, id={self._id})"

    def __str__(self) -> str:
        return str(self._kind) if self._kind is DeviceKind.HOST else f"{self._kind}:{self._id}"

    @property
    def id(self) -> int:
        """Number of the device; 0 for host memory."""
        return self._id

    @property
    def kind(self) -> DeviceKind:
        """Kind of memory."""
        return self._kind


class SerializedDescriptor(BaseModel):  # type: ignore[misc,unused-ignore]
    """A region as sent to another process."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    device: str = "cpu"
    ptr: int = 0
    size: int = 0

    def to_descriptor(self) -> "Descriptor":
        """Return a descriptor of the region, which lies in the other process."""
        return Descriptor((self.ptr, self.size, self.device, None))

    @field_validator("device")
    @classmethod
    def validate_device(cls, v: str) -> str:
        """Raise `ValueError` for an unknown device."""
        name = v.strip().lower()
        if not re.match("cpu$|cuda|xpu", name):
            raise ValueError(f"device {v!r}: must be cpu, cuda:N or xpu:N")
        return name

    @field_validator("ptr")
    @classmethod
    def validate_ptr(cls, v: int) -> int:
        """Raise `ValueError` for the null pointer."""
        if v == 0:
            raise ValueError("ptr: cannot be zero")
        return v

    @field_validator("size")
    @classmethod
    def validate_size(cls, v: int) -> int:
        """Raise `ValueError` for a negative size."""
        if v < 0:
            raise ValueError(f"size {v}: must be 0 or more")
        return v


class RdmaMetadata(BaseModel):  # type: ignore[misc,unused-ignore]
    """An offered operation as sent to another process."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    descriptors: list[SerializedDescriptor] = []
    nixl_metadata: str = ""
    notification_key: str = ""
    operation_kind: int = 0

    def to_descriptors(self) -> "Descriptor | list[Descriptor]":
        """Return the descriptor, or several. Raise `ValueError` without one."""
        if not self.descriptors:
            raise ValueError("descriptors: must contain at least one")
        found = [one.to_descriptor() for one in self.descriptors]
        return found[0] if len(found) == 1 else found

    @field_validator("operation_kind")
    @classmethod
    def validate_operation_kind(cls, v: int) -> int:
        """Raise `TypeError` for an unknown kind."""
        if v not in range(1, 4):
            raise TypeError(f"operation_kind {v}: must be a value of OperationKind")
        return v


class Descriptor:
    """A region of memory: a tensor, an array with its device, bytes, or a tuple of address, size, device and owner."""

    def __init__(self, data: Any) -> None:
        self._device = Device("cpu")
        self._handle: Any = None
        self._connection: Any = None
        self._data: Any = data
        self._ptr: int
        self._size: int
        torch = sys.modules.get("torch")  # A tensor exists only where torch is imported.
        if data is None:
            raise ValueError("data cannot be None")
        if torch is not None and isinstance(data, torch.Tensor):
            self._data = data.contiguous()
            self._ptr, self._size = self._data.data_ptr(), data.numel() * data.element_size()
            self._device = Device(str(data.device))
        elif isinstance(data, bytes | bytearray):
            view = np.frombuffer(data, np.uint8)
            self._ptr, self._size = int(view.ctypes.data), view.nbytes
        elif isinstance(data, tuple) and len(data) >= 2:
            self._read_tuple(data)
        else:
            raise TypeError(f"data of type {type(data).__name__}: must be a tensor, a tuple, bytes or bytearray")

    def _read_tuple(self, data: tuple[Any, ...]) -> None:
        first, second = data[:2]
        if isinstance(first, int) and isinstance(second, int):
            self._ptr, self._size = first, second
            device = data[2] if len(data) > 2 else self._device
            self._data = data[3] if len(data) > 3 else None
        else:
            interface = getattr(first, "__array_interface__", None) or getattr(first, "__cuda_array_interface__", None)
            if interface is None:
                raise TypeError(f"data[0] of type {type(first).__name__}: must be an array or an address")
            self._ptr, self._size, self._data, device = interface["data"][0], first.nbytes, first, second
        if not isinstance(device, Device | str):
            raise TypeError(f"device {device!r}: must be Device or str")
        self._device = device if isinstance(device, Device) else Device(device)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._connection._nixl.deregister_memory(self._handle)
            self._handle = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def __str__(self) -> str:
        return f"ptr={self._ptr:#x}, size={self._size}, device={self._device}"

    @property
    def device(self) -> Device:
        """Device of the memory."""
        return self._device

    @property
    def is_registered(self) -> bool:
        """Whether NIXL may access the memory."""
        return self._handle is not None

    @property
    def ptr(self) -> int:
        """Address."""
        return self._ptr

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    @property
    def metadata(self) -> SerializedDescriptor:
        """The region as sent to another process."""
        return SerializedDescriptor(device=str(self._device), ptr=self._ptr, size=self._size)

    @staticmethod
    def from_serialized(serialized: SerializedDescriptor) -> "Descriptor":
        """Return a descriptor of a region in another process."""
        if not isinstance(serialized, SerializedDescriptor):
            raise TypeError("serialized must be SerializedDescriptor")
        return serialized.to_descriptor()

    def register_with_connector(self, connection: Any) -> None:
        """Permit NIXL to access the memory. Raise `RuntimeError` if another connection has it registered."""
        if not self._ptr:
            raise ValueError(f"memory at the null pointer cannot be registered: {self}")
        if self._handle is not None:
            self._require_owner(connection, self._connection)
            return
        region = (self._ptr, self._size, self._device.id, "")
        self._handle = connection._nixl.register_memory([region], self._device.kind.nixl_mem_type)
        self._connection = connection

    def deregister_with_connector(self, connection: Any) -> None:
        """End NIXL's access. Raise `RuntimeError` if another connection has it registered."""
        self._require_owner(connection, self._connection)
        handle, self._handle, self._connection = self._handle, None, None
        if handle is not None:
            connection._nixl.deregister_memory(handle)

    @staticmethod
    def _require_owner(connection: Any, owner: Any) -> None:
        """Raise `RuntimeError` if another connection has registered the memory."""
        if owner is not connection:
            raise RuntimeError(
                f"memory of connection {getattr(owner, 'name', None)} cannot be used with {connection.name}"
            )
