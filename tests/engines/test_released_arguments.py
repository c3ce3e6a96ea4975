"""The command lines of `dynamo serve` for vLLM and SGLang are accepted by the released adapters, with the real engine's parser."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peer import PeerMissing, ensure_peer
from tools.engines_env import sglang_python

pytestmark = [pytest.mark.engines, pytest.mark.conformance]

PROGRAM = """
import json, pathlib, sys
# Our package is installed there too; the released one must be imported.
sys.meta_path = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
sys.path = [one for one in sys.path if not (pathlib.Path(one) / "dynamo" / "cpu").exists()] + [sys.argv[1]]
from dynamo.vllm.args import parse_args
config = parse_args(sys.argv[2:])
engine = config.engine_args
print(json.dumps({
    "mode": config.disaggregation_mode.value, "name": config.served_model_name, "block_size": engine.block_size,
    "connector": engine.kv_transfer_config.kv_connector if engine.kv_transfer_config else None,
    "events": engine.kv_events_config.endpoint if engine.kv_events_config else None,
}))
"""

SGLANG_PROGRAM = """
import asyncio, json, sys
from unittest.mock import MagicMock
sys.path.append(sys.argv[1])
import sglang
sglang.Engine = MagicMock()  # It cannot be imported without a GPU; the released adapter only takes its methods.
from dynamo.sglang.args import parse_args
config = asyncio.run(parse_args(sys.argv[2:]))
server = config.server_args
print(json.dumps({
    "mode": server.disaggregation_mode, "name": server.served_model_name, "page_size": server.page_size,
    "transfer": server.disaggregation_transfer_backend, "has_port": server.disaggregation_bootstrap_port > 0,
    "events": config.dynamo_args.use_kv_events,
}))
"""


@pytest.fixture(scope="module")
def released() -> str:
    """Directory of the released package."""
    try:
        python = Path(ensure_peer())
    except PeerMissing as error:
        pytest.skip(str(error))
    (packages,) = python.parent.parent.glob("lib/python3*/site-packages")
    return str(packages)


def workers_of(engine: str, model: str, *arguments: str) -> list[list[str]]:
    """Return the arguments of each worker that `dynamo serve` starts for prefill and decode."""
    command = [sys.executable, "-m", "dynamo.cli", "serve", model, "--engine", engine, "--prefill-workers", "1"]
    command += ["--router-mode", "kv", "--dry-run", "--", *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    module = f"dynamo.{engine}"
    lines = [shlex.split(line) for line in printed.splitlines()]
    return [words[words.index(module) + 1 :] for words in lines if module in words]


def parsed(python: str, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [python, "-P", "-c", program, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def by_mode(python: str, program: str, released: str, workers: list[list[str]]) -> dict[str, Any]:
    found = {}
    for arguments in workers:
        done = parsed(python, program, released, *arguments)
        assert done.returncode == 0, done.stderr
        value = json.loads(done.stdout.splitlines()[-1])
        found[value.pop("mode")] = value
    return found


def test_released_adapter_accepts_the_workers_of_dynamo_serve(engines_python: str, model: str, released: str) -> None:
    found = by_mode(engines_python, PROGRAM, released, workers_of("vllm", model, "--block-size", "32"))
    name = Path(model).name
    assert found["decode"] == {"name": name, "block_size": 32, "connector": "NixlConnector", "events": None}
    assert found["prefill"].pop("events").startswith("tcp://*:")
    assert found["prefill"] == {"name": name, "block_size": 32, "connector": "NixlConnector"}


def test_released_sglang_adapter_accepts_the_workers_of_dynamo_serve(model: str, released: str) -> None:
    python = sglang_python()
    if not os.path.exists(python):
        pytest.skip("SGLang is not installed: run tools/engines_env.py")
    found = by_mode(python, SGLANG_PROGRAM, released, workers_of("sglang", model, "--page-size", "16"))
    expected = {"name": Path(model).name, "page_size": 16, "transfer": "nixl", "has_port": True}
    assert found == {"prefill": {**expected, "events": True}, "decode": {**expected, "events": False}}
    refused = parsed(python, SGLANG_PROGRAM, released, "--model-path", model, "--page-sise", "16")
    assert refused.returncode != 0
    assert "--page-sise" in refused.stderr
