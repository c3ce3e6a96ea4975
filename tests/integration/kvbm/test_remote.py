"""A scheduler in another process uses the block manager over a local socket that malformed frames do not break."""

import contextlib
import os
import pickle  # noqa: TID251 - what an attacker would send
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.settle import until_blocking

from dynamo.core.errors import ConfigError
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import BlockIdentity, Tier
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.orders import Outgoing
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.remote import ManagerServer, RemoteManager, socket_path

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a short path: that of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvbm-") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[BlockManager]:
    config = KvbmConfig(
        cpu_blocks=4, disk_blocks=16, disk_dir=str(tmp_path), disk_filter=False, onboard_timeout_s=PATIENCE_S
    )
    manager = BlockManager(config, BlockLayout((4,), "int64", "model"))
    manager.start()
    yield manager
    manager.close()
    assert manager.book.host.held() == 0


def block(key: int) -> BlockIdentity:
    return BlockIdentity(key, key + 1000, key - 1 if key > 1 else None)


def offload(manager: BlockManager, *keys: int) -> None:
    manager.offload([Outgoing(block(key), partial(np.copyto, src=key)) for key in keys])
    disk = manager.book.lower[Tier.DISK]
    until_blocking(lambda: all(key in disk for key in keys) and not manager.book.host.held())


def test_remote_manager_finds_blocks_from_another_process(manager: BlockManager) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    away = RemoteManager(engine_id)
    for first in (1, 3, 5):
        offload(manager, first, first + 1)
    assert away.find([1]) == []
    ticket = away.begin([block(1), block(2)])
    assert ticket is not None
    deadline = time.monotonic() + PATIENCE_S
    while not away.is_over(ticket):
        assert time.monotonic() < deadline
    slots = away.find([1, 2])
    assert [int(manager.array(slot)[0]) for slot in slots] == [1, 2]
    away.release(slots)
    away.end(ticket)
    away.end(ticket)
    assert away.begin([block(99)]) is None
    away.clear()
    assert away.find([1]) == []
    away.close()
    server.close()


def test_remote_manager_reports_no_blocks_without_answer(manager: BlockManager) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    away = RemoteManager(engine_id)
    assert away.find([1]) == []
    server.close()
    assert away.find([1]) == []
    assert away.begin([block(1)]) is None
    assert away.is_over(1)
    away.close()


def test_remote_manager_fails_before_the_worker_listens() -> None:
    with pytest.raises(FileNotFoundError):
        RemoteManager(secrets.token_hex(8))


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


class Payload:
    """Would create a file if it were unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x00", b"\xff\xff\xff\xff", frame(b"nonsense"), frame(b"\x81\xa4type\xa4nope"), frame(b"\xc1"), "pickle"],
)
def test_manager_server_survives_malformed_frames(manager: BlockManager, tmp_path: Path, sent: bytes | str) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    target = tmp_path / "created by a frame"
    body = frame(pickle.dumps(("find", Payload(str(target))))) if isinstance(sent, str) else sent
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE_S)
        link.connect(socket_path(engine_id))
        with contextlib.suppress(OSError):
            link.sendall(body)
            link.shutdown(socket.SHUT_WR)
            assert link.recv(10) == b""
    assert not target.exists()
    away = RemoteManager(engine_id)
    assert away.find([1]) == []
    assert away._link is not None, "the server answers no more"
    away.close()
    server.close()


def test_manager_server_survives_a_request_that_fails(manager: BlockManager) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    for slots in ([-1], [10_000]):
        faulty = RemoteManager(engine_id)
        faulty.release(slots)
        assert faulty._link is None
    away = RemoteManager(engine_id)
    assert away.find([1]) == []
    assert away._link is not None
    away.close()
    server.close()


def test_manager_server_refuses_other_users(manager: BlockManager, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    monkeypatch.setattr("dynamo.kvbm.transfer.accepting.user_id", lambda: os.geteuid() + 1)
    away = RemoteManager(engine_id)
    away.find([1])
    assert away._link is None
    server.close()


def test_manager_server_ends_tickets_of_a_scheduler_that_left(manager: BlockManager) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    for first in (1, 3, 5):
        offload(manager, first, first + 1)
    away = RemoteManager(engine_id)
    ticket = away.begin([block(1), block(2)])
    assert ticket is not None
    away.close()
    server.close()
    until_blocking(lambda: not manager.book.host.held(), "the ticket is held for a scheduler that left")


def test_manager_server_socket_is_in_a_private_directory(manager: BlockManager) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    path = Path(socket_path(engine_id))
    assert engine_id not in path.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.close()
    assert not path.exists()


def test_manager_server_removes_sockets_of_killed_processes(manager: BlockManager) -> None:
    left = Path(socket_path("killed"))
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
    alive = ManagerServer(manager, "alive")
    other = ManagerServer(manager, "other")
    assert not left.exists()
    assert Path(socket_path("alive")).exists()
    other.close()
    alive.close()


def test_manager_server_refuses_a_second_server_of_the_same_engine(manager: BlockManager) -> None:
    server = ManagerServer(manager, "engine")
    with pytest.raises(ConfigError, match="another process of this engine"):
        ManagerServer(manager, "engine")
    server.close()
