"""Planner peer: the released planner with the numerical libraries that it imports, in an environment of its own.

    python -m benchmarks.planner_peer

The environment reads the released package from the peer's (`benchmarks.peer`). Two packages that it imports are not
published; a program that runs the planner there puts an import stub in their place. `DYNAMO_PLANNER_PEER_HOME` names an
environment to use or make elsewhere.
"""

import os
import sys
import venv

from benchmarks.corpus import cache_dir
from benchmarks.peer import INSTALL_TIMEOUT_S, PeerMissing, _run, ensure_peer, peer_python
from dynamo.core.config import setting

PACKAGES = (
    "filelock",
    "filterpy",
    "grpcio",
    "kubernetes",
    "pandas",
    "plotly",
    "pmdarima",
    "prometheus-api-client",
    "prophet",
    "protobuf",
    "pydantic",
    "scikit-learn",
)
PROBE = "import pmdarima, prophet, filterpy, sklearn, pydantic"


def planner_home() -> str:
    """Return the directory of the environment."""
    return setting("DYNAMO_PLANNER_PEER_HOME", os.path.join(cache_dir(), "planner-peer"), str)


def planner_python() -> str:
    """Return the interpreter in which the released planner is imported, whether or not it exists."""
    return os.path.join(planner_home(), "bin", "python")


def ensure_planner_peer() -> str:
    """Return the interpreter, installed first if need be. Raise `PeerMissing`."""
    python = planner_python()
    if os.path.exists(os.path.join(planner_home(), "ready")):
        return python
    ensure_peer()
    print(f"installing the libraries of the released planner into {planner_home()} (about 600 MB, once)", flush=True)
    venv.create(planner_home(), with_pip=True, symlinks=True)
    _run([python, "-m", "pip", "install", "--quiet", *PACKAGES], timeout_s=INSTALL_TIMEOUT_S)
    _run([python, "-c", PROBE], timeout_s=INSTALL_TIMEOUT_S)
    tag = f"python{sys.version_info.major}.{sys.version_info.minor}"
    peer = os.path.join(os.path.dirname(os.path.dirname(peer_python())), "lib", tag, "site-packages")
    with open(os.path.join(planner_home(), "lib", tag, "site-packages", "peer.pth"), "w", encoding="utf-8") as file:
        file.write(f"{peer}\n")
    with open(os.path.join(planner_home(), "ready"), "w", encoding="utf-8"):
        return python


def main() -> int:
    """Install the environment and print its interpreter."""
    try:
        print(ensure_planner_peer())
    except PeerMissing as error:
        print(f"the released planner is missing: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
