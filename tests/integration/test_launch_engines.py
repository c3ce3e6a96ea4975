"""The launch scripts of the mocker, and those of SGLang and TensorRT-LLM over scripted packages."""

import os
from pathlib import Path

import httpx
import pytest
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.integration.test_engine_adapters import MODEL, ROOT
from tests.integration.test_launch_cpu import COMPONENTS, Launched

pytestmark = pytest.mark.integration

BACKENDS = ROOT / "examples" / "backends"
KINDS = [
    *(("mocker", name) for name in COMPONENTS),
    *((kind, name) for kind in ("sglang", "trtllm") for name in ("agg.sh", "disagg.sh")),
]


def launch(kind: str, name: str, folder: Path, *flags: str) -> Launched:
    scripts = BACKENDS / kind / "launch"
    if kind == "mocker":
        return Launched(name, folder, "--model-name", "m", *flags, scripts=scripts)
    return Launched(
        name,
        folder,
        "--model",
        MODEL,
        "--served-model-name",
        "m",
        *flags,
        scripts=scripts,
        PYTHONPATH=os.pathsep.join((str(ROOT / "tests" / "scripted_packages"), str(ROOT))),
        SCRIPTED_FOLDER=str(folder),
        DYN_PREFILL_DRAIN_TIMEOUT_S="0",
    )


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_script_starts_its_graph_and_ends_all_processes(kind: str, name: str, tmp_path: Path) -> None:
    launched = launch(kind, name, tmp_path)
    try:
        wait_until(
            lambda: launched.instances == COMPONENTS[name], f"its workers never came: {launched.log.read_text()}"
        )
        body = {"model": "m", "messages": [{"role": "user", "content": "What is Dynamo?"}], "max_tokens": 8}
        url = f"http://127.0.0.1:{launched.port}/v1/chat/completions"

        def is_answered() -> bool:
            return httpx.post(url, json=body, timeout=DEADLINE_S).status_code == 200

        wait_until(is_answered, "the model was never served")
        for port in launched.metrics:
            wait_until(
                lambda port=port: launched.get(f"http://127.0.0.1:{port}/metrics").status_code == 200, "no metrics"
            )  # type: ignore[misc]
    finally:
        status = launched.end()
    assert status == 143
    wait_until(lambda: not launched.left, "processes are left")
    assert list(launched.temporary.iterdir()) == []


@pytest.mark.parametrize("kind", ["mocker", "sglang", "trtllm"])
def test_unknown_flag_ends_the_graph(kind: str, tmp_path: Path) -> None:
    launched = launch(kind, "agg.sh", tmp_path, "--no-such-flag")
    assert launched.process.wait(DEADLINE_S) == 2
    wait_until(lambda: not launched.left, "processes are left")
    assert "--no-such-flag" in launched.log.read_text()
