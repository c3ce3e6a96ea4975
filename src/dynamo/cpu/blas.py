"""Blas: OpenBLAS thread count and instruction set, which must be set before numpy is imported.

The thread count can also be changed later, so that several threads of the engine each compute products with one thread.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
CPU_INFO = "/proc/cpuinfo"
CPU_INFO_CHARS_MAX = 8192  # The first processor's entry; all processors are assumed equal.
SMALL_MODEL_BYTES = 64_000_000  # Checkpoint size; below it, synchronising threads takes longer than computing.


NAMES = (("scipy_", "64_"), ("", "64_"), ("", ""), ("scipy_", ""))
"""Prefix and suffix of OpenBLAS functions: in wheels of numpy 2, in wheels of numpy 1, and in packages of distributions."""


@dataclass(frozen=True, slots=True)
class BlasThreads:
    """Thread count of the OpenBLAS library that numpy uses."""

    get: Callable[[], int]
    put: Callable[[int], object]


def loaded() -> BlasThreads | None:
    """Return the thread count of numpy's OpenBLAS; None if numpy uses another library."""
    try:
        from numpy.linalg import _umath_linalg

        library = ctypes.CDLL(
            _umath_linalg.__file__
        )  # Symbols are found in the libraries that it was linked with, too.
    except (ImportError, OSError):
        return None
    for prefix, suffix in NAMES:
        get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
        put = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
        if get is not None and put is not None:
            return BlasThreads(get, put)
    return None


def cores() -> int:
    """Return the number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def suitable_threads(path: str, workers: int = 1, cores_there: int | None = None) -> int:
    """Return the threads for each of `workers` processes that run the model in this directory; 1 if there is no model.

    One core is left free: threads that synchronise with each other all stall when one of them is preempted.
    """
    try:
        sizes = [entry.stat().st_size for entry in os.scandir(path) if entry.name.endswith(".safetensors")]
    except OSError:
        return 1  # The model loader reports the missing model.
    there = cores() if cores_there is None else cores_there
    return max(1, (there - 1) // workers) if sum(sizes) > SMALL_MODEL_BYTES else 1


def prepare(
    threads: int,
    variables: Mapping[str, str],
    *,
    cpu_info: str = CPU_INFO,
    put: Callable[[str, str], None] = os.putenv,
) -> bool:
    """Set the thread count and, where OpenBLAS detects it wrongly, the instruction set. Return False if numpy is loaded."""
    if "numpy" in sys.modules:
        return False
    put("OPENBLAS_NUM_THREADS", str(threads))
    if "OPENBLAS_CORETYPE" not in variables and _is_amd_with_avx512(cpu_info):
        # OpenBLAS 0.3.31 detects Zen 5 as Haswell, which is half as fast; its SkylakeX kernels use AVX-512.
        put("OPENBLAS_CORETYPE", "SkylakeX")
    return True


def _is_amd_with_avx512(cpu_info: str) -> bool:
    try:
        with open(cpu_info, encoding="ascii", errors="replace") as file:
            text = file.read(CPU_INFO_CHARS_MAX)
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return "AuthenticAMD" in text and set(flags.split()) >= AVX512
