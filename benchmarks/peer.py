"""Peer: the released system, in an environment of its own that this module creates.

    python -m benchmarks.peer

The project imports none of it; its processes run next to ours. `DYNAMO_PEER_HOME` names another environment to use or
create.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Sequence

from benchmarks.corpus import cache_dir
from dynamo.core.config import environ, setting

VERSION = "1.6.1"
PACKAGES = (f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}")
OVERRIDES = (
    'aisimulate==0.13.0 ; python_version < "3.0"',  # A pinned simulator that frontend and mocker run without.
    "certifi",  # Pinned to one release, which a mirror of the package index may not have.
)
INSTALL_TIMEOUT_S = 900.0
PROBE_TIMEOUT_S = 60.0
PROBE = "import dynamo._core, dynamo.frontend, dynamo.mocker"


class PeerMissing(Exception):
    """The released system cannot run here; the message gives the reason in one line."""


def peer_home() -> str:
    """Return the directory that holds the environment, `venv`."""
    return setting("DYNAMO_PEER_HOME", os.path.join(cache_dir(), "peer"), str)


def peer_python(home: str | None = None) -> str:
    """Return the path of the released system's interpreter, whether or not it exists."""
    return os.path.join(home or peer_home(), "venv", "bin", "python")


def is_ready(home: str | None = None) -> bool:
    """Return whether the released frontend and mocker can be imported, in a process of their own."""
    python = peer_python(home)
    if not os.path.exists(python):
        return False
    try:
        _run([python, "-c", PROBE], timeout_s=PROBE_TIMEOUT_S)
    except PeerMissing:
        return False
    return True


def ensure_peer(home: str | None = None) -> str:
    """Return the peer's interpreter, installed first if need be. Raises `PeerMissing`."""
    home = home or peer_home()
    python = peer_python(home)
    if is_ready(home):
        return python
    print(f"installing ai-dynamo {VERSION} into {home} (about 500 MB, once)", flush=True)
    os.makedirs(home, exist_ok=True)
    venv.create(os.path.join(home, "venv"), with_pip=True, symlinks=True)
    overrides = os.path.join(home, "overrides.txt")
    with open(overrides, "w", encoding="utf-8") as file:
        file.write("\n".join(OVERRIDES) + "\n")
    _run([python, "-m", "pip", "install", "--quiet", "uv"], timeout_s=INSTALL_TIMEOUT_S)
    uv = os.path.join(home, "venv", "bin", "uv")
    install = [uv, "pip", "install", "--quiet", "--python", python, "--override", overrides, *PACKAGES]
    _run(install, timeout_s=INSTALL_TIMEOUT_S)
    _run([python, "-c", PROBE], timeout_s=PROBE_TIMEOUT_S)
    return python


def _run(command: Sequence[str], *, timeout_s: float) -> None:
    """Run one step without the caller's Python path. Raises `PeerMissing` with the last line of its output."""
    env = {name: value for name, value in environ().items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    name = " ".join(os.path.basename(word) for word in command[:4])
    try:
        done = subprocess.run(
            command,
            env=env,
            timeout=timeout_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerMissing(f"{name}: not done after {timeout_s:.0f} s") from None
    except OSError as error:
        raise PeerMissing(f"{name}: {error.strerror}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        raise PeerMissing(f"{name}: {lines[-1] if lines else f'exit status {done.returncode}'}")


def main() -> int:
    try:
        print(ensure_peer())
    except PeerMissing as error:
        print(f"the peer is missing: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
