"""Memory: return of freed memory to the operating system, and use of a process."""

import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

from dynamo.core.slices import SLICE_VALUES

FREE_WAITS_S = (0.005, 0.02, 0.1, 0.0)
"""Waits for the request that read a buffer to end."""


def trim_memory(find: Callable[[], object] = lambda: ctypes.CDLL(None).malloc_trim) -> bool:
    """Return free pages to the system, in a few milliseconds in which other threads run; False if unsupported.

    Call it after rare work that took much memory, such as loading a model.
    """
    try:
        trim = find()
    except (OSError, AttributeError):  # Only glibc has `malloc_trim`.
        return False
    assert callable(trim), "a function of the library"
    return bool(trim(0))


def release_pages(address: int, size: int) -> bool:
    """Release the whole pages of a memory range, which stays mapped and reads as zero when it is next used.

    Only for memory that is private to this process. Return False, without effect, if the system does not support it.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or not sys.platform.startswith("linux"):  # Other systems do not guarantee zeroed pages.
        return False
    if end <= first:
        return True
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice) == 0)


def unwritten_buffer(size: int) -> bytearray:
    """Return a buffer whose content is undefined until it is written; its memory is taken page by page as that happens.

    One that grows is copied again and again, and `bytearray(size)` writes zeros: 100 MB in some 70 ms.
    """
    make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
    made: bytearray = make(None, size)
    return made


def free_buffer(held: list[bytearray]) -> bool:
    """Free the only buffer of the list, which blocks other threads only briefly; call it in a thread of its own.

    Freeing 100 MB takes some 30 ms with the interpreter locked; the pages are therefore released first. Return False, and only
    drop the reference, if anything else still has the buffer or a view of it.
    """
    body = held.pop()
    for wait_s in FREE_WAITS_S:
        if sys.getrefcount(body) == 2 and body:  # This variable, and the argument of the call.
            return release_pages(ctypes.addressof(ctypes.c_char.from_buffer(body)), len(body))
        time.sleep(wait_s)
    return False


def free_lists(held: list[list[Any]]) -> int:
    """Free the lists of the list in parts, between which other threads run; call it in a thread of its own.

    Freeing a million numbers takes some 8 ms with the interpreter locked. Return how many were freed; what else has a reference
    to a list keeps it, and then only the reference is dropped.
    """
    freed, waits_s = 0, iter(FREE_WAITS_S)
    while held:
        values = held.pop()
        while sys.getrefcount(values) > 2 and (wait_s := next(waits_s, None)) is not None:  # As in `free_buffer`.
            time.sleep(wait_s)
        if sys.getrefcount(values) == 2:
            freed += 1
            while values:
                del values[-SLICE_VALUES:]
    return freed


def resident_bytes() -> int:
    """Return how much memory of this process is resident; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
