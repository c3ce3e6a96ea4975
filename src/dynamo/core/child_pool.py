"""ChildPool: computation on untrusted input in child processes that have limits on memory and time.

    pool = ChildPool("dynamo.text.chat_template.child", deadline_s=10, memory_bytes=512 << 20)
    pool.call({"template": "…"}, key="model-a")      blocks; in a thread

A child runs `python -m MODULE`, which calls `child_process.serve`. Requests and answers are msgpack frames on its
standard input and output. A child that exceeds a limit is killed and replaced; an idle one is ended after a while.
"""

import atexit
import contextlib
import os
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dynamo.core.config import selected_environment
from dynamo.core.errors import HttpError, InvalidArgument

HEADER = struct.Struct("!IQ")  # Bytes of the message, and of the data behind it.
READ_BYTES = 1 << 18
IDLE_S = 60.0  # Starting a child takes about 0.2 s; keeping one takes about 40 MB.
WAITING_MAX = 64  # Callers that wait for a free child; each of them holds a thread.
UNWANTED_S = 0.2  # Maximum time until a child whose result is no longer needed is ended.
EXIT_WAIT_S = 5.0  # A killed process is gone within milliseconds; this bounds a wait on a stopped machine.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "TZ")
"""Variables that a child is given: what it needs to run, and no secret."""

START_S = 60.0  # A child imports its libraries and reads its files, perhaps from a cold disk.
READY, OK, REFUSED, HTTP_ERROR, OUT_OF_MEMORY, FAILED = "ready", "ok", "refused", "http", "memory", "failed"
"""Kinds of responses of a child."""

Wanted = Callable[[], bool]
"""Returns whether the result is still needed."""


class ChildError(Exception):
    """A child returned no result."""


class ChildTimeout(ChildError):
    """The computation exceeded its time."""


class ChildOutOfMemory(ChildError):
    """The computation exceeded its memory, or ended its process."""


class ChildPoolBusy(ChildError):
    """No child was free in time."""


class ChildUnwanted(ChildError):
    """The result is no longer needed."""


class _Child(Struct, eq=False):
    process: "subprocess.Popen[bytes]"
    idle_since_s: float = 0.0

    @property
    def input(self) -> int:
        assert self.process.stdin is not None, "a child is started with pipes"
        return self.process.stdin.fileno()

    @property
    def output(self) -> int:
        assert self.process.stdout is not None, "a child is started with pipes"
        return self.process.stdout.fileno()

    def kill(self) -> None:
        """End the process and release its pipes."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_WAIT_S)


class ChildPool:
    """Child processes for one kind of computation. Safe to use from several threads."""

    def __init__(
        self,
        module: str,
        *,
        deadline_s: float,
        memory_bytes: int,
        arguments: Sequence[str] = (),
        children_max: int = 2,
        per_key_max: int = 1,
        waiting_max: int = WAITING_MAX,
        idle_s: float = IDLE_S,
        variables: Sequence[str] = (),
        prefixes: tuple[str, ...] = (),
    ) -> None:
        """Start no process yet.

        `deadline_s` and `memory_bytes` bound one computation; the memory is counted beyond what the child needs itself.
        `per_key_max` bounds the children that work for one key, so that one source of slow input cannot occupy all.
        `variables` and `prefixes` name the environment variables that a child needs in addition to the usual ones.
        """
        self.deadline_s = deadline_s
        self._command = [sys.executable, "-P", "-m", module, str(memory_bytes), str(deadline_s), *arguments]
        self._children_max = children_max
        self._per_key_max = per_key_max
        self._waiting_max = waiting_max
        self._idle_s = idle_s
        self._variables = (*ENVIRONMENT, *variables)
        self._prefixes = prefixes
        self._changed = threading.Condition()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._starting = 0
        self._waiting = 0
        self._keys: Counter[str] = Counter()
        self._reaper: threading.Thread | None = None
        self._is_closed = False
        _POOLS.add(self)

    @property
    def children(self) -> int:
        """Number of processes."""
        return len(self._idle) + len(self._busy) + self._starting

    def call(
        self,
        request: Any,
        data: bytes | bytearray = b"",
        *,
        key: str = "",
        deadline_s: float | None = None,
        wait_s: float | None = None,
        is_wanted: Wanted | None = None,
    ) -> Any:
        """Return the child's answer. Block for `wait_s` at most until a child is free, for its start, and for the deadline.

        `data` is large: it is not copied here, and the child finds it behind the members of `request`, which is a tuple.
        `is_wanted` is called a few times a second; once it returns False, end the child and raise `ChildUnwanted`.
        Raise `ChildError`, and `InvalidArgument` or `HttpError` where the child's computation raised that.
        """
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        child = self._acquire(key, time.monotonic() + (limit_s if wait_s is None else wait_s), is_wanted)
        kept: _Child | None = None
        try:
            frame = msgspec.msgpack.encode(request)  # A large one exists only while a child works on it.
            answer = _exchange(child, frame, data, time.monotonic() + limit_s, limit_s, is_wanted)
            kind, value, is_spent = answer
            if kind != OUT_OF_MEMORY and not is_spent:
                kept = child
        finally:
            self._release(child, kept is not None, key)
        return _outcome(kind, value)

    def close(self) -> None:
        """End all children. Calls that are under way raise `ChildOutOfMemory`."""
        with self._changed:
            self._is_closed = True
            children = [*self._idle, *self._busy]
            self._idle.clear()
            self._changed.notify_all()
        for child in children:
            if child in self._busy:
                child.process.kill()  # Its caller reads the end of the pipe, and releases it.
            else:
                child.kill()

    def _acquire(self, key: str, until_s: float, is_wanted: Wanted | None) -> _Child:
        with self._changed:
            if self._waiting >= self._waiting_max:
                raise ChildPoolBusy(f"{self._waiting} requests wait for a free process already")
            self._waiting += 1
            try:
                while not self._is_closed and not self._may_start(key):
                    left_s = until_s - time.monotonic()
                    if not self._changed.wait(_look_s(left_s, is_wanted)) and time.monotonic() >= until_s:
                        raise ChildPoolBusy("no process was free in time")
                    _require_wanted(is_wanted)
            finally:
                self._waiting -= 1
            if self._is_closed:
                raise ChildPoolBusy("the pool is closed")
            self._keys[key] += 1
            while self._idle:
                child = self._idle.pop()
                if child.process.poll() is None:
                    self._busy.add(child)
                    return child
                child.kill()
            self._starting += 1
        try:
            child = self._start()
        except (OSError, ChildError) as error:
            with self._changed:
                self._starting -= 1
                self._drop_key(key)
                self._changed.notify_all()
            raise ChildError(f"{' '.join(self._command)} cannot be started: {error}") from None
        with self._changed:
            self._starting -= 1
            self._busy.add(child)
        return child

    def _may_start(self, key: str) -> bool:
        is_free = bool(self._idle) or self.children < self._children_max
        return is_free and self._keys[key] < self._per_key_max

    def _start(self) -> _Child:
        environment = selected_environment(self._variables, self._prefixes)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent.
        )
        child = _Child(process)
        os.set_blocking(child.input, False)
        os.set_blocking(child.output, False)
        try:
            _exchange(child, b"", b"", time.monotonic() + START_S, START_S)
        except ChildError:
            child.kill()
            raise
        return child

    def _release(self, child: _Child, is_kept: bool, key: str) -> None:
        if not is_kept or self._is_closed:
            child.kill()
        with self._changed:
            self._busy.discard(child)
            self._drop_key(key)
            if is_kept and not self._is_closed:
                child.idle_since_s = time.monotonic()
                self._idle.append(child)
                if self._reaper is None:
                    self._reaper = threading.Thread(target=self._reap, name="child-pool-reaper", daemon=True)
                    self._reaper.start()
            self._changed.notify_all()

    def _drop_key(self, key: str) -> None:
        self._keys[key] -= 1
        if self._keys[key] <= 0:
            del self._keys[key]

    def _reap(self) -> None:
        """End children that were idle for long; the thread ends with the last of them."""
        while True:
            with self._changed:
                now_s = time.monotonic()
                ended = [one for one in self._idle if now_s - one.idle_since_s >= self._idle_s]
                self._idle = [one for one in self._idle if one not in ended]
                if not self._idle and not ended:
                    self._reaper = None
                    return
            for child in ended:
                child.kill()
            if not ended:
                time.sleep(min(self._idle_s / 4, 5.0))


def _exchange(
    child: _Child,
    frame: bytes,
    data: bytes | bytearray,
    until_s: float,
    limit_s: float,
    is_wanted: Wanted | None = None,
) -> tuple[str, Any, bool]:
    """Send a frame and return the answer: its kind, its value, and whether the child is to be replaced.

    Without a frame, wait for the one that a child sends when it is ready.
    """
    unsent = [memoryview(part) for part in (data, frame, HEADER.pack(len(frame), len(data))) if part] if frame else []
    received = bytearray()
    size: int | None = None
    poller = select.poll()
    poller.register(child.output, select.POLLIN)
    if unsent:
        poller.register(child.input, select.POLLOUT)
    while size is None or len(received) < size:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise ChildTimeout(f"it takes longer than {limit_s:g} s")
        _require_wanted(is_wanted)
        for descriptor, _ in poller.poll(_look_s(left_s, is_wanted) * 1000 + 1):
            try:
                if descriptor == child.output:
                    piece = os.read(child.output, READ_BYTES)
                    if not piece:
                        raise ChildOutOfMemory("it exceeded the memory or the time of its process")
                    received += piece
                else:
                    part = unsent.pop()
                    rest = part[os.write(child.input, part[:READ_BYTES]) :]
                    if rest:
                        unsent.append(rest)
                    if not unsent:
                        poller.unregister(child.input)
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ChildOutOfMemory("it exceeded the memory or the time of its process") from None
        if size is None and len(received) >= HEADER.size:
            size, _ = HEADER.unpack_from(received)
            del received[: HEADER.size]
    return msgspec.msgpack.decode(received, type=tuple[str, Any, bool])


def _look_s(left_s: float, is_wanted: Wanted | None) -> float:
    """Return how long to wait before the next look at whether the result is wanted."""
    return left_s if is_wanted is None else min(left_s, UNWANTED_S)


def _require_wanted(is_wanted: Wanted | None) -> None:
    if is_wanted is not None and not is_wanted():
        raise ChildUnwanted("its result is no longer wanted")


def _outcome(kind: str, value: Any) -> Any:
    if kind == OK:
        return value
    if kind == REFUSED:
        message, param = value
        raise InvalidArgument(message, param=param)
    if kind == HTTP_ERROR:
        code, message = value
        raise HttpError(code, message)
    if kind == OUT_OF_MEMORY:
        raise ChildOutOfMemory("it needs more memory than it may have")
    raise ChildError(value)


_POOLS: "weakref.WeakSet[ChildPool]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()
