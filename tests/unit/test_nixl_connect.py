"""Transfers of memory, with an agent in memory in the place of NIXL's."""

import ctypes
from typing import Any

import pytest

from dynamo.nixl_connect import Connector, Descriptor, Device, DeviceKind, OperationStatus, RdmaMetadata, connection


class Agent:
    """All agents share one process: a transfer copies memory."""

    notifications: dict[str, list[bytes]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, name: str) -> None: ...

    def register_memory(self, regions: Any, mem_type: str) -> object:
        return object()

    def deregister_memory(self, handle: object) -> None: ...

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        return descs

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str, message: bytes) -> Any:
        return (operation, local, remote, agent)

    def transfer(self, handle: Any, message: bytes) -> str:
        operation, local, remote, agent = handle
        for mine, other in zip(local, remote, strict=True):
            target, source = (mine, other) if operation == "READ" else (other, mine)
            ctypes.memmove(target[0], source[0], source[1])
        self.notifications.setdefault(agent, []).append(message)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None: ...

    def update_notifs(self) -> dict[str, list[bytes]]:
        return self.notifications


@pytest.fixture(autouse=True)
def _agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "nixl_agent", Agent)


async def test_read_copies_a_readable_region_and_both_sides_complete() -> None:
    source, target = bytearray(b"abcd"), bytearray(4)
    offered = await Connector("one").create_readable(Descriptor(source))
    metadata = RdmaMetadata.model_validate_json(offered.metadata().model_dump_json())
    assert offered.status is OperationStatus.INITIALIZED
    operation = await Connector("two").begin_read(metadata, Descriptor(target))
    await operation.wait_for_completion()
    await offered.wait_for_completion()
    assert target == b"abcd"
    assert operation.results()[0].size == 4


async def test_write_copies_to_a_writable_region() -> None:
    source, target = bytearray(b"wxyz"), bytearray(4)
    with await Connector().create_writable(Descriptor(target)) as offered:
        operation = await Connector().begin_write(Descriptor(source), offered.metadata(hex_encode=True))
        await operation.wait_for_completion()
    assert target == b"wxyz"


async def test_operations_refuse_the_other_kind_and_other_sizes() -> None:
    offered = await Connector().create_readable(Descriptor(bytearray(4)))
    with pytest.raises(RuntimeError, match="not offered for WRITE"):
        await Connector().begin_write(Descriptor(bytearray(4)), offered.metadata())
    with pytest.raises(ValueError, match="sizes"):
        await Connector().begin_read(offered.metadata(), Descriptor(bytearray(3)))


def test_nixl_devices_are_parsed_and_compared() -> None:
    assert (str(Device("gpu:1")), Device("cuda").kind, str(Device("host"))) == ("cuda:1", DeviceKind.CUDA, "cpu")
    with pytest.raises(ValueError):
        Device("tpu")
