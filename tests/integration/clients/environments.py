"""Environments below `.cache` for clients that the project itself does not need, one for each client.

    python -m tests.integration.clients.environments

The project imports none of them; the tests run their scripts in separate processes.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".cache" / "clients"
PACKAGES = {
    "openai-2": ("openai>=2,<3",),
    "openai-3": ("openai>=3,<4",),
    "langchain": ("langchain-openai>=1.3",),
    "litellm": ("litellm>=1.80", "mcp>=1.20"),  # Imported as soon as a tool is used.
    "lm-eval": ("lm-eval[api]>=0.4.9", "transformers>=4.57"),  # For its tokenizers; without PyTorch.
    "aiperf": ("aiperf>=0.13",),
    "schemathesis": ("schemathesis>=4.10",),  # Its plugin would slow every run.
}
"""Python clients, each with an environment of its own."""
NODE = ("openai@>=6", "zod@>=4")
INSTALL_TIMEOUT_S = 900.0
DONE = "installed"
"""File that lists the installed packages."""


def python_of(name: str) -> Path:
    """Return the path of an environment's interpreter, whether or not it exists."""
    return HOME / name / "bin" / "python"


def why_not(name: str) -> str | None:
    """Return the reason why an environment cannot be used, or None."""
    if name == "node" and shutil.which("node") is None:
        return "node is not installed"
    if not (HOME / name / DONE).exists():
        return f"{name} is not installed: `make test-clients` does that"
    return None


def make(name: str) -> None:
    """Create an environment, unless it exists with the wanted packages."""
    wanted = " ".join(NODE if name == "node" else PACKAGES[name])
    place = HOME / name
    stamp = place / DONE
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing {wanted}", flush=True)
    place.mkdir(parents=True, exist_ok=True)
    if name == "node":
        run("npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(place), *NODE)
    else:
        venv.create(place, with_pip=True, symlinks=True)
        run(str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name])
    stamp.write_text(wanted)


def run(*command: str) -> None:
    """Run one step, without the caller's Python path."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, env=env)


def main() -> None:
    """Install the environments that the command line names, or all; the one for Node only where there is npm."""
    names = sys.argv[1:] or [*PACKAGES, "node"]
    unknown = sorted(set(names) - {*PACKAGES, "node"})
    if unknown:
        sys.exit(f"error: {unknown[0]}: must be one of {', '.join([*PACKAGES, 'node'])}")
    for name in names:
        if name == "node" and shutil.which("npm") is None:
            print("npm is not installed: OpenAI's client for Node is left out", file=sys.stderr)
        else:
            make(name)


if __name__ == "__main__":
    main()
