"""Memory: what was freed is given back to the system, where the C library would keep it for later."""

import ctypes
import mmap
import sys
from collections.abc import Callable


def give_back(find: Callable[[], object] = lambda: ctypes.CDLL(None).malloc_trim) -> bool:
    """Gives free pages back, in a few milliseconds in which other threads run; False where the library cannot.

    For after work that took much memory and is not soon done again, such as loading a model.
    """
    try:
        trim = find()
    except (OSError, AttributeError):  # Only glibc has it.
        return False
    assert callable(trim), "a function of the library"
    return bool(trim(0))


def forget(address: int, size: int) -> bool:
    """Gives the whole pages of this memory back, which stays where it is and is zero when it is next used.

    For memory of this process alone. False, and nothing done, where the system cannot.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or not sys.platform.startswith("linux"):  # Elsewhere the advice promises less.
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
