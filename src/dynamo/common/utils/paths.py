"""The directory of the sources, for tools that read files of it."""

from pathlib import Path

from dynamo.core.config import environ

CONTAINER_DIR = "/workspace"

__all__ = ["WORKSPACE_DIR", "get_workspace_dir"]


def get_workspace_dir() -> str:
    """Return the current directory if it is a source tree, else `WORKSPACE_DIR`, else the container's directory."""
    here = Path.cwd()
    if (here / "Cargo.toml").exists():
        return str(here)
    fallback = CONTAINER_DIR if Path(CONTAINER_DIR).exists() else str(here)
    return environ().get("WORKSPACE_DIR") or fallback


WORKSPACE_DIR = get_workspace_dir()
