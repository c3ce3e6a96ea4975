"""deploy/docker-compose.yml: the format, and the same commands with the servers of this machine."""

import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from tests.cluster.nats import nats_server_binary
from tests.cluster.processes import stop_process, wait_until

pytestmark = pytest.mark.integration

FILE = Path(__file__).parents[3] / "deploy" / "docker-compose.yml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    """Run a server during the block."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
        assert process.poll() is None
    finally:
        process.terminate()
        stop_process(process)


def answer(url: str) -> str:
    """Return the text at an address, empty while there is none."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except OSError:
        return ""


def test_compose_file_is_valid() -> None:
    compose_spec.compose_spec.PyCompose.from_yaml(FILE.read_text()).validate()
    assert set(SERVICES) == {"nats-server", "etcd-server"}
    ports = {name: [one.split(":")[0] for one in service["ports"]] for name, service in SERVICES.items()}
    assert ports == {"nats-server": ["4222", "6222", "8222"], "etcd-server": ["2379", "2380"]}


def test_nats_starts_with_the_flags_of_the_compose_file(tmp_path: Path) -> None:
    binary = nats_server_binary()
    assert binary is not None
    address = "127.0.88.1"  # Its ports are fixed by the flags.
    with running([binary, *SERVICES["nats-server"]["command"], "-a", address], tmp_path):
        wait_until(lambda: '"config"' in answer(f"http://{address}:8222/jsz"), "JetStream is not on")


def test_etcd_starts_with_the_flags_of_the_compose_file(tmp_path: Path) -> None:
    binary = shutil.which("etcd", path=str(Path(sys.executable).parent)) or shutil.which("etcd")
    assert binary is not None
    address = "127.0.88.2"
    _, *flags = SERVICES["etcd-server"]["command"]
    for name in ("0.0.0.0", "etcd-server:"):
        flags = [one.replace(name, address + (":" if name.endswith(":") else "")) for one in flags]
    flags = [one.replace("/tmp/etcd-data", str(tmp_path / "data")) for one in flags]
    with running([binary, *flags], tmp_path):
        wait_until(lambda: '"health":"true"' in answer(f"http://{address}:2379/health"), "etcd is not healthy")
