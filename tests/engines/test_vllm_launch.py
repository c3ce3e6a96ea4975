"""The launch script of one worker: it starts its processes, forwards unknown arguments, and leaves nothing."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.ports import free_port
from tests.engines.conftest import PLAIN, EngineCluster
from tests.engines.tiny_model import ROOT

pytestmark = pytest.mark.engines


def test_script_starts_one_worker_and_a_frontend(serve: Callable[[str], EngineCluster], engines_python: str) -> None:
    servers = serve("launch")
    servers.port, metrics = free_port(), free_port()
    servers.system.append(metrics)
    script = str(Path(ROOT) / "examples" / "backends" / "vllm" / "launch" / "agg.sh")
    process = servers.run(
        "agg", [script, "--model", servers.model, "--served-model-name", "tiny", *PLAIN],
        PYTHON=engines_python, DYN_HTTP_PORT=str(servers.port), DYN_SYSTEM_PORT1=str(metrics),
    )  # fmt: skip
    servers.until_ready()
    assert servers.complete("a page", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert servers.metric("vllm:generation_tokens_total") == 4
    process.terminate()
    assert process.wait(120) == 143
    servers.processes.remove(process)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"--http-port {servers.port}" not in listed
    assert servers.model not in listed


def test_dynamo_serve_starts_two_workers_with_their_own_ports(
    serve: Callable[[str], EngineCluster], engines_python: str
) -> None:
    servers = serve("serve")
    servers.port = free_port()
    process = servers.run(
        "serve",
        [
            engines_python, "-m", "dynamo.cli", "serve", servers.model, "--engine", "vllm", "--workers", "2",
            "--router-mode", "kv", "--http-port", str(servers.port), "--", "--served-model-name", "tiny", *PLAIN,
        ],
    )  # fmt: skip
    servers.until_ready()
    assert servers.complete("a page", max_tokens=4)["usage"]["completion_tokens"] == 4
    process.terminate()
    assert process.wait(120) == 0
    servers.processes.remove(process)
