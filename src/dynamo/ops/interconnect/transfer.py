"""NIXL transfer between two processes of one node: prints one JSON line with the rate in GB/s.

This file uses the standard library and nixl alone, so that its text runs in a pod without this package:
`python3 -c LAUNCHER TEXT BACKEND BYTES ROUNDS`. An error of the library ends the program with its traceback.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

ROUNDS = 20
SIZE_MB = 64
LIMIT_S = 60.0
LAUNCHER = "import sys; exec(sys.argv[1])"


def agent(name: str, backend: str) -> Any:
    """Return an agent with one backend."""
    from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return nixl_agent(name, nixl_agent_config(backends=[backend]))


def registered(own: Any, size: int) -> tuple[Any, Any, int]:
    """Return a buffer that the agent may transfer, and its description."""
    buffer = (ctypes.c_uint8 * size)()
    address = ctypes.addressof(buffer)
    return buffer, own.register_memory([(address, size, 0, "")], "DRAM"), address


def written(path: str, data: bytes) -> None:
    """Write a file at once."""
    with open(path + ".partial", "wb") as file:
        file.write(data)
    os.replace(path + ".partial", path)


def awaited(path: str, deadline: float, process: "subprocess.Popen[bytes] | None" = None) -> bytes:
    """Return the content of a file that another process writes."""
    while not os.path.exists(path):
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            raise RuntimeError("the source process wrote nothing: " + path)
        time.sleep(0.01)
    with open(path, "rb") as file:
        return file.read()


def source(folder: str, backend: str, size: int) -> None:
    """Offer a buffer until the other process is done."""
    own = agent("check-source", backend)
    buffer, region, address = registered(own, size)
    ctypes.memset(address, 7, size)
    written(os.path.join(folder, "source"), own.get_agent_metadata())
    written(os.path.join(folder, "address"), str(address).encode())
    awaited(os.path.join(folder, "done"), time.monotonic() + LIMIT_S)
    own.deregister_memory(region)
    del buffer


def measure(backend: str, size: int, rounds: int, text: str) -> dict[str, float]:
    """Return the rate of reads from another process in GB/s, and the seconds of the fastest."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", LAUNCHER, text, backend, str(size), str(rounds), folder]
        other = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 -- a list of arguments, no shell
        deadline = time.monotonic() + LIMIT_S
        try:
            own = agent("check-target", backend)
            buffer, region, address = registered(own, size)
            metadata = awaited(os.path.join(folder, "source"), deadline, other)
            there = int(awaited(os.path.join(folder, "address"), deadline, other))
            name = own.add_remote_agent(metadata)
            local = own.get_xfer_descs([(address, size, 0)], "DRAM")
            remote = own.get_xfer_descs([(there, size, 0)], "DRAM")
            times = []
            for _ in range(rounds):
                handle = own.initialize_xfer("READ", local, remote, name)
                started = time.perf_counter()
                state = own.transfer(handle)
                while state == "PROC" and time.monotonic() < deadline:
                    state = own.check_xfer_state(handle)
                times.append(time.perf_counter() - started)
                own.release_xfer_handle(handle)
                if state != "DONE":
                    raise RuntimeError("transfer ended in state " + str(state))
            if buffer[0] != 7 or buffer[size - 1] != 7:
                raise RuntimeError("the data that arrived is not that of the source")
            own.deregister_memory(region)
            return {"gb_per_s": size * len(times) / sum(times) / 1e9, "best_s": min(times)}
        finally:
            written(os.path.join(folder, "done"), b"1")
            try:
                other.wait(5.0)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()


def main(argv: list[str], text: str) -> None:
    """Measure with the arguments BACKEND, BYTES and ROUNDS and print the result; with FOLDER be the source."""
    backend, size, rounds = argv[0], int(argv[1]), int(argv[2])
    if len(argv) > 3:
        source(argv[3], backend, size)
    else:
        found: dict[str, Any] = {
            "backend": backend,
            "bytes": size,
            "rounds": rounds,
            **measure(backend, size, rounds, text),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[2:], sys.argv[1])
