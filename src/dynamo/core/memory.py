"""Memory: return of freed memory to the operating system, and use of a process."""

import ctypes
import mmap
import sys
from collections.abc import Callable


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


def resident_bytes() -> int:
    """Return how much memory of this process is resident; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
