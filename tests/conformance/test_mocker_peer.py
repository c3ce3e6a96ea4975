"""Our mocker beside the released one: in the roles that its frontend gives out, and at its pace."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.mocker_fidelity import compare, ratios
from benchmarks.peer import is_ready, peer_home, peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, free_port, ours, theirs

pytestmark = pytest.mark.conformance

STOP_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    return peer_python()


@contextlib.contextmanager
def workers(registry: dict[str, str], *roles: list[str]) -> Iterator[None]:
    """Mockers of ours, one for each list of flags."""
    command = [sys.executable, "-m", "dynamo.mocker", "--discovery-backend", "file"]
    command += ["--model-path", bench_model(), "--model-name", MODEL_NAME, "--block-size", "16"]
    processes = [subprocess.Popen([*command, *flags], env=os.environ | registry) for flags in roles]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(STOP_S)


@pytest.mark.parametrize("meeting", ["one after the other", "at once"])
@pytest.mark.parametrize("frontend", ["ours", "theirs"])
def test_a_frontend_drives_our_mocker_as_prefill_and_decode(
    peer: str, tmp_path: Path, frontend: str, meeting: str
) -> None:
    registry = {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "error",
        **dict.fromkeys(
            ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_HTTP_RPC_HOST"), HOST
        ),
    }
    prefill = ["--disaggregation-mode", "prefill"]
    if meeting == "at once":
        prefill += ["--bootstrap-ports", str(free_port())]
    recipe = Recipe(
        name=frontend,
        frontend=theirs(peer) if frontend == "theirs" else ours(),
        engine=ours(),
        workers=0,
        variables=registry,
    )
    with workers(registry, prefill, ["--disaggregation-mode", "decode"]), Stack(recipe, bench_model()) as stack:
        for number in range(3):
            status, body = stack.ask("POST", "/v1/chat/completions", question(number))
            assert status == 200, body
            assert body["usage"]["completion_tokens"] == 5
            placed = body["nvext"]["worker_id"]
            assert placed["prefill_worker_id"] != placed["decode_worker_id"]


def question(number: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": f"{number} " + "word " * 200}],
        "max_tokens": 5,
        "nvext": {"extra_fields": ["worker_id"]},
    }


@pytest.mark.parametrize("engine_type", ["vllm", "sglang", "trtllm"])
def test_our_mocker_takes_the_time_of_the_released_one(peer: str, engine_type: str) -> None:
    """Within a bound that a noisy machine keeps; benchmarks/mocker_fidelity.py prints the figures."""
    found = compare(peer, requests=12, concurrency=3, rounds=2, flags=["--engine-type", engine_type])
    quick = {what: ratio for what, ratio in ratios(found).items() if "p10" in what}
    assert all(0.7 < ratio < 1.4 for ratio in quick.values()), quick
