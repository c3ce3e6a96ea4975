"""Schemathesis on our own OpenAPI document: responses match the document, and none is a 5xx."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.integration.clients import environments

pytestmark = [pytest.mark.integration, pytest.mark.clients]

HERE = Path(__file__).parent
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance",
)  # fmt: skip
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "10"))
"""Random examples of each operation."""
CHOICE = ["--generation-deterministic"] if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else []
"""CI sends the same examples every time, as its other property tests do; elsewhere every run sends others."""
DEADLINE_S = 30.0 * max(10, EXAMPLES)
OPERATIONS_MIN, CASES_MIN = 29, 1000
ANSWERED = ("chat_completions", "completions", "embeddings", "responses", "anthropic_messages")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "--enable-anthropic-api", "--batch-dir", str(tmp_path / "batches")) as cluster:
        cluster.scripted_worker()
        cluster.run("cpu", "--model-name", "e", "--embedding-worker")
        wait_until(lambda: cluster.workers() == 2, "the second worker never appeared")
        yield cluster


@pytest.mark.skipif(
    environments.why_not("schemathesis") is not None, reason=str(environments.why_not("schemathesis"))
)  # fmt: skip
def test_responses_conform_to_the_openapi_document(cluster: Cluster, tmp_path: Path) -> None:
    # One worker: threads that parse at once fail in some releases of CPython 3.11 (python/cpython#106905).
    command = [
        str(environments.HOME / "schemathesis" / "bin" / "st"), "run", f"http://127.0.0.1:{cluster.port}/openapi.json",
        "--checks", ",".join(CHECKS), "--max-examples", str(EXAMPLES), "--phases", "examples,coverage,fuzzing",
        "--workers", "1", "--continue-on-failure", "--suppress-health-check", "all", "--no-color",
        *CHOICE,
    ]  # fmt: skip
    hooks = {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE / "clients")}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, check=False,
        cwd=tmp_path, env={**os.environ, **hooks},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:]
    print(done.stdout[-2000:])
    tested = re.search(r"Tested: (\d+)", done.stdout)
    cases = re.search(r"(\d+) generated", done.stdout)
    assert tested is not None and int(tested[1]) >= OPERATIONS_MIN
    assert cases is not None and int(cases[1]) >= CASES_MIN
    answered = {
        endpoint: cluster.metric("dynamo_frontend_requests_total", endpoint=endpoint, status="success")
        for endpoint in ANSWERED
    }
    print(answered)
    assert all(answered.values()), f"not every kind of answer was seen: {answered}"
    assert "Traceback" not in (cluster.folder / "frontend0.log").read_text()
