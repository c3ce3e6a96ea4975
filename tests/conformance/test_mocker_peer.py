"""Our mocker compared with the released one: in the roles that its frontend assigns, and at its pace."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.mocker_fidelity import PROMPT_TOKENS, compare
from benchmarks.stacks import (
    HOST,
    MODEL_NAME,
    Implementation,
    Recipe,
    Stack,
    free_port,
    ours,
    stack_environment,
    theirs,
)
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

STOP_S = 20.0
ROUNDS = 8
"""Measurements of each prompt length; other work on the machine can only lengthen one, so the shortest is compared."""
PLACES = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_HTTP_RPC_HOST")


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


def registry(home: Path) -> dict[str, str]:
    """Discovery directory of all processes of a test."""
    place = {"DYN_FILE_KV": str(home / "kv"), "DYN_EVENT_PLANE": "zmq", "DYN_LOG": "error"}
    return place | dict.fromkeys(PLACES, HOST)


@contextlib.contextmanager
def workers(home: Path, *roles: list[str], pythons: tuple[str, ...] = ()) -> Iterator[None]:
    """Run mockers, one for each list of flags: ours, unless an interpreter is named."""
    flags = ["--model-path", bench_model(), "--model-name", MODEL_NAME, "--block-size", "16"]
    processes = []
    try:
        for python, role in zip(pythons or (sys.executable,) * len(roles), roles, strict=True):
            variables = stack_environment(str(home), os.environ) | registry(home)
            command = [python, "-m", "dynamo.mocker", *flags, *role]
            processes.append(subprocess.Popen(command, env=variables, cwd=home, stdin=subprocess.DEVNULL))
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve_a_pair(home: Path, frontend: Implementation, prefill: str, decode: str, *flags: str, at_once: bool) -> None:
    """Send requests to a prefill and a decode worker of either implementation."""
    meets = ["--bootstrap-ports", str(free_port())] if at_once else []
    recipe = Recipe(name=frontend.name, frontend=frontend, engine=ours(), workers=0, variables=registry(home))
    roles = (["--disaggregation-mode", "prefill", *meets, *flags], ["--disaggregation-mode", "decode", *flags])
    with workers(home, *roles, pythons=(prefill, decode)), Stack(recipe, bench_model()) as stack:
        for number in range(3):
            status, body = stack.send_request("POST", "/v1/chat/completions", question(number), timeout_s=30)
            assert status == 200, body
            assert body["usage"]["completion_tokens"] == 5
            placed = body["nvext"]["worker_id"]
            assert placed["prefill_worker_id"] != placed["decode_worker_id"]


@pytest.mark.parametrize("meeting", ["one after the other", "at once"])
@pytest.mark.parametrize("frontend", ["ours", "theirs"])
def test_released_frontend_serves_with_our_mockers_as_prefill_and_decode_workers(
    peer: str, tmp_path: Path, frontend: str, meeting: str
) -> None:
    implementation = theirs(peer) if frontend == "theirs" else ours()
    serve_a_pair(tmp_path, implementation, sys.executable, sys.executable, at_once=meeting == "at once")


@pytest.mark.parametrize("meeting", ["one after the other", "at once"])
@pytest.mark.parametrize("prefill", ["ours", "theirs"])
@pytest.mark.parametrize("frontend", ["ours", "theirs"])
def test_prefill_and_decode_mockers_of_different_implementations_serve_together(
    peer: str, tmp_path: Path, frontend: str, prefill: str, meeting: str
) -> None:
    implementation = theirs(peer) if frontend == "theirs" else ours()
    pair = (sys.executable, peer) if prefill == "ours" else (peer, sys.executable)
    serve_a_pair(tmp_path, implementation, *pair, at_once=meeting == "at once")


@pytest.mark.parametrize("prefill", ["ours", "theirs"])
def test_sglang_mockers_of_different_implementations_serve_together(peer: str, tmp_path: Path, prefill: str) -> None:
    """SGLang mockers reserve space before the prompt is computed."""
    pair = (sys.executable, peer) if prefill == "ours" else (peer, sys.executable)
    serve_a_pair(tmp_path, ours(), *pair, "--engine-type", "sglang", at_once=True)


def question(number: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": f"{number} " + "word " * 200}],
        "max_tokens": 5,
        "nvext": {"extra_fields": ["worker_id"]},
    }


@pytest.mark.parametrize("engine_type", ["vllm", "sglang", "trtllm"])
def test_our_mocker_has_the_latency_of_the_released_one(peer: str, engine_type: str) -> None:
    """Shortest times, for each length of prompt; benchmarks/mocker_fidelity.py prints whole distributions."""
    lengths = len(PROMPT_TOKENS)
    found = compare(peer, requests=lengths, concurrency=1, rounds=ROUNDS, flags=["--engine-type", engine_type])
    ratios = {
        f"{what} of {PROMPT_TOKENS[place]} tokens": min(getattr(found["ours"], what)[place::lengths])
        / min(getattr(found["theirs"], what)[place::lengths])
        for what in ("ttft", "itl")
        for place in range(lengths)
    }
    assert all(0.8 < ratio < 1.25 for ratio in ratios.values()), f"ours over theirs: {ratios}"


@pytest.mark.parametrize(("frontend", "engine"), [("ours", "theirs"), ("theirs", "ours")])
def test_frontend_routes_by_kv_events_of_the_other_implementations_mocker(
    peer: str, frontend: str, engine: str
) -> None:
    """A repeated prompt goes to the worker that caches it, although the frontend's default is round robin."""
    implementations = {"ours": ours(), "theirs": theirs(peer)}
    recipe = Recipe(
        name=frontend,
        frontend=implementations[frontend],
        engine=implementations[engine],
        engine_flags=[
            "--num-workers",
            "3",
            "--block-size",
            "16",
            "--router-mode",
            "kv",
            "--router-queue-threshold",
            "8",
        ],
    )
    with Stack(recipe, bench_model()) as stack:
        deadline = time.monotonic() + STOP_S
        while True:  # The event of a stored block arrives a little later.
            placed = [
                stack.send_request("POST", "/v1/chat/completions", question(7), timeout_s=30)[1] for _ in range(7)
            ]
            chosen = {one["nvext"]["worker_id"]["decode_worker_id"] for one in placed}
            if len(chosen) == 1:
                break
            assert time.monotonic() < deadline, f"the same prompt went to {chosen}"
