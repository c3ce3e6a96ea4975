"""Environment with vLLM, a tiny model, and servers that run for the whole session."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.processes import LOG_TAIL_BYTES, ProcessGroup, stop_process, wait_until
from tests.engines.tiny_model import write_adapter, write_model
from tools.engines_env import EnginesMissing, ensure_engines, has_nixl

START_S = 600.0  # An engine starts within half a minute on idle cores; these may be shared by many.
ANSWER_S = 180.0
STOP_TIMEOUT_S = 90.0
PLAIN = ("--enforce-eager", "--max-num-seqs", "16", "--block-size", "32", "--dtype", "bfloat16")


class EngineCluster(ProcessGroup):
    """A frontend, vLLM workers and vLLM's own servers around one discovery directory."""

    def __init__(self, folder: Path, python: str, model: str) -> None:
        super().__init__(folder)
        self.python = python
        self.model = model
        self.http = httpx.Client(timeout=ANSWER_S)
        self.port = 0
        self.system: list[int] = []

    def environment(self) -> dict[str, str]:
        return super().environment() | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One thread for each engine, not bound to a core: several threads of several engines on few cores spend
            # their time waiting for each other, and an engine then starts in minutes.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "PYTHONHASHSEED": "0",
            "DYN_DISCOVERY_BACKEND": "file",
        }

    def run(self, name: str, command: list[str], **variables: str) -> "subprocess.Popen[bytes]":
        """Start a process that logs to `NAME.log`."""
        return self.start(name, command, variables)

    def frontend(self, *argv: str) -> None:
        self.port = free_port()
        host = ["--http-host", "127.0.0.1", "--http-port", str(self.port)]
        self.run("frontend", [sys.executable, "-m", "dynamo.frontend", *host, *argv])

    def worker(self, name: str, *argv: str, **variables: str) -> "subprocess.Popen[bytes]":
        port = free_port()
        self.system.append(port)
        command = [self.python, "-m", "dynamo.vllm", "--model", self.model, "--served-model-name", "tiny", *PLAIN]
        return self.run(name, [*command, *argv], DYN_SYSTEM_PORT=str(port), **variables)

    def vllm_server(self, *argv: str) -> str:
        """Start vLLM's own OpenAI server on the same model; return its address."""
        port = free_port()
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        self.run("vllm", [*command, "--model", self.model, "--served-model-name", "tiny", *PLAIN, *argv])
        return f"http://127.0.0.1:{port}"

    def until_ready(self, *names: str) -> None:
        """Wait until every process runs and the frontend serves the models."""
        wait_until(lambda: self._serves(names or ("tiny",)), f"not served: {self.logs()}", START_S)

    def _serves(self, names: tuple[str, ...]) -> bool:
        assert all(one.poll() is None for one in self.processes), f"a process ended: {self.logs()}"
        return set(names) <= set(self.models())

    def models(self) -> list[str]:
        try:
            return [one["id"] for one in self.http.get(self.url("/v1/models")).json()["data"]]
        except httpx.TransportError:
            return []

    def instances(self) -> set[int]:
        """Return the ids of the instances that the frontend finds."""
        try:
            return {one["instance_id"] for one in self.http.get(self.url("/health")).json()["instances"]}
        except httpx.TransportError:
            return set()

    def logs(self) -> str:
        """Return the end of each log, also of processes that another one starts."""
        paths = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-LOG_TAIL_BYTES:]}" for path in paths)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def post(self, path: str, base: str | None = None, **body: Any) -> dict[str, Any]:
        answer = self.http.post(f"{base}{path}" if base else self.url(path), json=body)
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}\n{self.logs()}"
        found: dict[str, Any] = answer.json()
        return found

    def complete(self, prompt: str, base: str | None = None, **body: Any) -> dict[str, Any]:
        """Return one completion, greedy by default."""
        given = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, **body}
        return self.post("/v1/completions", base, **given)

    def control(self, method: str, path: str, worker: int = 0, **body: Any) -> httpx.Response:
        """Return the URL of a worker's system port."""
        return self.http.request(method, f"http://127.0.0.1:{self.system[worker]}{path}", json=body or None)

    def metric(self, name: str, worker: int = 0) -> float:
        """Return the sum of a series at a worker's system port."""
        lines = self.control("GET", "/metrics", worker).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def stop(self) -> None:
        self.http.close()
        for process in self.processes:
            process.terminate()
        while self.processes:
            self.end(self.processes[-1])

    def end(self, process: "subprocess.Popen[bytes]") -> None:
        """Stop one process; an engine needs up to a minute."""
        self.processes.remove(process)
        process.terminate()
        stop_process(process, STOP_TIMEOUT_S)


@pytest.fixture(scope="session")
def engines_python() -> str:
    try:
        return ensure_engines()
    except EnginesMissing as error:
        pytest.skip(f"the engines' environment cannot be made here: {error}")


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="engines-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def model(folder: Path) -> str:
    return write_model(str(folder / "tiny"))


@pytest.fixture(scope="session")
def adapter(folder: Path) -> str:
    return write_adapter(str(folder / "adapter"))


@pytest.fixture(scope="session")
def serve(engines_python: str, folder: Path, model: str) -> Iterator[Callable[[str], EngineCluster]]:
    """Return a function that starts groups of servers, which stop with the session."""
    made: list[EngineCluster] = []

    def make(name: str) -> EngineCluster:
        place = folder / name
        os.makedirs(place / "kv")
        made.append(EngineCluster(place, engines_python, model))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture(scope="session")
def needs_nixl(engines_python: str) -> None:
    if not has_nixl():
        pytest.skip("NIXL is not installed beside vLLM")
