"""LoRA between prefill and decode workers: a prompt computed under an adapter is decoded by the other worker."""

from pathlib import Path

import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.integration import adapters
from tests.integration.test_lora import COUNT, FLAGS, TUNED, System, prompts, text

pytestmark = [pytest.mark.integration, pytest.mark.reference, pytest.mark.filterwarnings("default")]


def test_prefill_and_decode_workers_use_the_same_adapter(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    ports = [free_port(), free_port()]
    systems = [System(port) for port in ports]
    try:
        for port, mode in zip(ports, ("prefill", "decode"), strict=True):
            cluster.run("cpu", "--model-name", "m", *FLAGS, "--disaggregation-mode", mode, DYN_SYSTEM_PORT=str(port))
        wait_until(lambda: cluster.is_live() and cluster.workers() >= 1, "a worker is missing")
        path = adapters.write(tmp_path / "tuned", *TUNED)
        wait_until(lambda: all(one.is_ready() for one in systems), "a worker is missing")
        for one in systems:
            assert one.load("tuned", str(path))["status"] == "success"
        wait_until(
            lambda: "tuned" in {one["id"] for one in cluster.http.get("/v1/models").json()["data"]},
            "the adapter is not listed",
        )
        want = adapters.greedily(adapters.merged(*TUNED), prompts()[0], COUNT)

        body = {"model": "tuned", "prompt": prompts()[0], "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}

        def fetched() -> float:
            lines = systems[1].http.get("/metrics").text.splitlines()
            found = [
                one for one in lines if one.startswith("dynamo_component_kv_fetches_total") and 'outcome="ok"' in one
            ]
            return sum(float(one.rsplit(" ", 1)[1]) for one in found)

        def is_split() -> bool:
            assert text(cluster.post(body, "/v1/completions")) == want
            return fetched() > 0

        wait_until(is_split, "no prompt came from the prefill worker")
    finally:
        for one in systems:
            one.http.close()
        cluster.stop()
