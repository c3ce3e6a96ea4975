"""ChildProcess: the child's side of `child_pool`: reads requests, computes within limits, writes answers."""

import contextlib
import math
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from dynamo.core.child_pool import FAILED, HEADER, HTTP_ERROR, OK, OUT_OF_MEMORY, READY, REFUSED
from dynamo.core.errors import HttpError, InvalidArgument
from dynamo.core.memory import resident_bytes

NICENESS = 5  # On a machine at full load the parent, which serves requests, has priority.
SPENT_BYTES = 128 << 20  # A child that grew by so much is replaced: freed memory is not always returned to the system.
ERROR_CHARS_MAX = 500


def serve(handle: Callable[[Any], Any], argv: list[str] | None = None) -> int:
    """Answer requests from standard input until it ends. `handle` is already warm: its memory is not counted."""
    arguments = sys.argv[1:] if argv is None else argv
    memory_bytes, deadline_s = int(arguments[0]), float(arguments[1])
    requests, answers = _take_pipes()
    _limit(memory_bytes)
    base_bytes = resident_bytes()
    _write(answers, msgspec.msgpack.encode((READY, None, False)))
    while (parts := _read(requests)) is not None:
        _limit_time(deadline_s)
        kind, value = _answer(handle, *parts)
        del parts
        is_spent = resident_bytes() - base_bytes > SPENT_BYTES
        try:
            data = msgspec.msgpack.encode((kind, value, is_spent))
        except (MemoryError, OverflowError, TypeError, ValueError) as error:
            kind = OUT_OF_MEMORY if isinstance(error, MemoryError) else FAILED
            data = msgspec.msgpack.encode((kind, str(error)[:ERROR_CHARS_MAX], True))
        _write(answers, data)
    return 0


def _answer(handle: Callable[[Any], Any], frame: bytes, data: bytes) -> tuple[str, Any]:
    try:
        request = msgspec.msgpack.decode(frame)
        return OK, handle([*request, data] if data else request)
    except InvalidArgument as error:
        return REFUSED, (str(error), error.param)
    except HttpError as error:
        return HTTP_ERROR, (error.code, error.message)
    except MemoryError:
        return OUT_OF_MEMORY, None
    except Exception as error:  # noqa: BLE001 - the boundary of the child: any failure is returned to the parent
        return FAILED, f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes to the parent; discard what libraries print."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def _read(requests: BinaryIO) -> tuple[bytes, bytes] | None:
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size, data_size = HEADER.unpack(header)
    frame, data = requests.read(size), requests.read(data_size)
    return (frame, data) if len(frame) == size and len(data) == data_size else None


def _write(answers: BinaryIO, data: bytes) -> None:
    answers.write(HEADER.pack(len(data), 0))
    answers.write(data)
    answers.flush()


def _limit(memory_bytes: int) -> None:
    """Bound the address space, the files and the priority of this process."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # If the machine runs out of memory, this process ends first.
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (0, 0))
    most = _address_space() + memory_bytes
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit; there only time bounds the memory.
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(deadline_s: float) -> None:
    """Bound the processor time of the next computation: it ends this process even if the parent is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + deadline_s) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
