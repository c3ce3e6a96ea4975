"""Every shell command of README.md, docs/ and examples/README.md runs as written in a copy of the tree."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documentation.blocks import PAGES, ROOT, page_blocks

pytestmark = pytest.mark.integration

IS_FRESH = bool(os.environ.get("DOCUMENTATION_FRESH"))
RUN = [page for page in PAGES if any(block.language == "sh" and not block.not_run for block in page_blocks(page))]
TIMEOUT_S = 3600.0 if IS_FRESH else 300.0
NAMESPACE = ("unshare", "-Urnpf", "--kill-child", "--mount-proc", "bash", "-c", '"$@"; exit $?', "bash")
"""A network namespace makes all ports available as written; in a process namespace, commands that look at the machine see no
process of another test, and none is left behind. Its first process, bash, reaps. Installations need the network and run
without both.
"""
TOOLS = ("bash", "curl", "make", "openssl")
README_PORTS = (8000, 9000)


def has_namespaces() -> bool:
    """Return whether this system has namespaces for unprivileged users."""
    with_true = [*NAMESPACE, "true"]
    return (
        not IS_FRESH and shutil.which("unshare") is not None and subprocess.run(with_true, check=False).returncode == 0
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    "pages", [["README.md", *RUN]] if IS_FRESH else [[page] for page in RUN], ids=lambda pages: pages[-1]
)
def test_documented_commands_run_as_written(pages: list[str], tmp_path: Path) -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    is_isolated = has_namespaces()
    if not is_isolated and not all(map(is_free, README_PORTS)):
        pytest.skip("the documented ports are in use, and this system has no network namespaces")
    done = subprocess.run(
        [*(NAMESPACE if is_isolated else ()), sys.executable, "-m", "tests.documentation.shell", str(tmp_path), *pages],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
