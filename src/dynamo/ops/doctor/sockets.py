"""Sockets: the process that listens on a TCP port, from /proc."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"
INODE = re.compile(r"socket:\[(\d+)\]")
COMMAND_CHARS_MAX = 80


def listener_of(port: int, proc: str = "/proc") -> str:
    """Return command and pid of a process that listens on a port; empty if none does."""
    pid = listener_pid(port, proc)
    if pid is None:
        return ""
    return f"{command_of(str(pid), proc)} (pid {pid})" if pid else "a process of another user"


def listener_pid(port: int, proc: str = "/proc") -> int | None:
    """Return the pid of a process that listens on a port, 0 for one of another user, None if none does."""
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            inodes |= listening_inodes(Path(f"{proc}/net/{name}").read_text().splitlines()[1:], port)
    if not inodes:
        return None
    for pid in sorted((name for name in os.listdir(proc) if name.isdigit()), key=int):
        with suppress(OSError):  # Processes of other users cannot be examined.
            for descriptor in os.listdir(f"{proc}/{pid}/fd"):
                match = INODE.fullmatch(os.readlink(f"{proc}/{pid}/fd/{descriptor}"))
                if match and match[1] in inodes:
                    return int(pid)
    return 0


def listening_ports(proc: str = "/proc") -> frozenset[int] | None:
    """Return the TCP ports that any process listens on; None on systems without /proc."""
    found: set[int] = set()
    is_known = False
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"{proc}/net/{name}").read_text().splitlines()[1:]:
                cells = line.split()
                if len(cells) > 9 and cells[3] == LISTEN:
                    found.add(int(cells[1].rpartition(":")[2], 16))
            is_known = True
    return frozenset(found) if is_known else None


def listening_inodes(lines: Iterable[str], port: int) -> set[str]:
    """Return the inodes of listening sockets with that local port, from the lines of /proc/net/tcp."""
    found = set()
    for line in lines:
        cells = line.split()
        if len(cells) > 9 and cells[3] == LISTEN and int(cells[1].rpartition(":")[2], 16) == port:
            found.add(cells[9])
    return found


def command_of(pid: str, proc: str = "/proc") -> str:
    """Return program and first arguments of a process."""
    with suppress(OSError):
        words = Path(f"{proc}/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        text = " ".join([os.path.basename(words[0]), *words[1:4]]).strip()
        if text:
            return text[:COMMAND_CHARS_MAX]
    return "process"
