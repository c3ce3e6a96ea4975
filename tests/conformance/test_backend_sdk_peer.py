"""The same engine of the unified backend SDK serves behind both frontends, run by our package and by the released one."""

import sys
from pathlib import Path

import pytest
from benchmarks.peer import peer_python
from tests.cluster.peers import OURS, THEIRS, PeerCluster, require_peer
from tests.integration.scripts import EXAMPLES

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.conformance

COMPLETIONS = "/v1/completions"
BODY = {"model": "repeat", "prompt": "The frontend speaks HTTP", "max_tokens": 100}


@pytest.mark.parametrize(
    ("prefill", "decode"), [(None, OURS), (None, THEIRS), (OURS, OURS), (OURS, THEIRS), (THEIRS, OURS)]
)
def test_engine_of_the_sdk_answers_the_same_in_every_combination(
    tmp_path: Path, prefill: str | None, decode: str
) -> None:
    require_peer()
    pythons = {OURS: sys.executable, THEIRS: peer_python()}
    engine = [str(EXAMPLES / "custom_engine/engine.py"), "--model", DEMO_MODEL, "--delay", "0"]
    with PeerCluster(tmp_path) as cluster:
        if prefill is not None:
            cluster.run([pythons[prefill], *engine, "--disaggregation-mode", "prefill"])
        cluster.run([pythons[decode], *engine, *(["--disaggregation-mode", "decode"] if prefill else [])])
        cluster.wait_answered(COMPLETIONS, BODY)
        for port in cluster.ports.values():
            response = cluster.request(port, "POST", COMPLETIONS, BODY).json
            assert response["choices"][0]["text"] == BODY["prompt"]
            assert response["choices"][0]["finish_reason"] == "length"
            assert response["usage"]["completion_tokens"] == response["usage"]["prompt_tokens"]
