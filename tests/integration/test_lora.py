"""LoRA end to end: adapters are loaded into running workers, return the output of merged weights, and are unloaded."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.object_server import ObjectServer

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.integration import adapters

pytestmark = [pytest.mark.integration, pytest.mark.reference, pytest.mark.filterwarnings("default")]

TUNED = (1, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
OTHER = (2, ("q_proj", "v_proj"))
FLAGS = ("--enable-lora", "--max-loras", "2", "--threads", "1", "--block-size", "16", "--kv-cache-blocks", "64")
COUNT = 16


class System:
    """System port of a worker."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)

    def load(self, name: str, uri: str) -> dict[str, Any]:
        return self.http.post("/v1/loras", json={"lora_name": name, "source": {"uri": uri}}).json()

    def unload(self, name: str) -> dict[str, Any]:
        return self.http.delete(f"/v1/loras/{name}").json()

    def is_ready(self) -> bool:
        """Return whether the worker accepts adapters, which it does a moment after it has registered."""
        try:
            return self.http.get("/v1/loras").status_code == 200
        except httpx.TransportError:
            return False

    def loaded(self) -> set[str]:
        return set(self.http.get("/v1/loras").json()["loras"])


class LoraCluster(Cluster):
    """A frontend that routes by KV cache, and two workers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--router-mode", "kv", "--migration-limit", "3")
        self.systems: list[System] = []
        self.store = ObjectServer()
        self.add(DYN_LORA_ENABLED="true", DYN_LORA_PATH=str(folder / "cache"), AWS_ENDPOINT_URL=self.store.url)
        self.add(DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS="256")  # With a tier below its cache.
        wait_until(lambda: self.is_live() and self.workers() == 2, "a worker is missing")
        wait_until(lambda: all(system.is_ready() for system in self.systems), "a worker does not accept adapters")
        self.paths = {
            "tuned": adapters.write(folder / "tuned", *TUNED),
            "other": adapters.write(folder / "other", *OTHER),
        }

    def add(self, *flags: str, **variables: str) -> None:
        port = free_port()
        self.run("cpu", "--model-name", "m", *FLAGS, *flags, DYN_SYSTEM_PORT=str(port), **variables)
        self.systems.append(System(port))

    def stop(self) -> None:
        for system in self.systems:
            system.http.close()
        self.store.server_close()
        super().stop()

    def models(self) -> set[str]:
        return {one["id"] for one in self.http.get("/v1/models").json()["data"]}

    def send_request(self, model: str, prompt: list[int], count: int = COUNT) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return self.post(body, "/v1/completions")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraCluster]:
    with LoraCluster(tmp_path_factory.mktemp("lora")) as found:
        yield found


def prompts() -> list[list[int]]:
    """Return prompts long enough that blocks would be shared where they must not be."""
    text = "A worker tells the router which blocks it holds, and the router sends a prompt to who holds its beginning. "
    beginning = adapters.tokenizer().encode(text * 2)
    return [beginning + adapters.tokenizer().encode(end) for end in ("Why?", "And then?", "What is lost?")]


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def test_adapter_output_equals_merged_weights_in_one_batch_with_the_model(cluster: LoraCluster) -> None:
    for system in cluster.systems:
        for name, path in cluster.paths.items():
            found = system.load(name, f"file://{path}")
            assert found["status"] == "success", found
        assert system.load("tuned", "file:///nowhere")["status"] == "success", "it is loaded already"
        assert system.loaded() == {"tuned", "other"}
    wait_until(lambda: cluster.models() == {"m", "tuned", "other"}, "an adapter is not listed")
    models = {"m": adapters.merged(None), "tuned": adapters.merged(*TUNED), "other": adapters.merged(*OTHER)}
    requested = [(name, prompt) for prompt in prompts() for name in models]
    wanted = [adapters.greedily(models[name], prompt, COUNT) for name, prompt in requested]
    for place in range(
        0, len(wanted), len(models)
    ):  # A prompt's texts; equal ones could not show which adapter was used.
        assert len(set(wanted[place : place + len(models)])) == len(models)
    with ThreadPoolExecutor(len(requested)) as pool:
        for _ in range(3):  # Then from the cache, from the tier below it, and all at once.
            found = list(pool.map(lambda one: text(cluster.send_request(*one)), requested))
            assert found == wanted


def test_prompt_is_cached_per_adapter(cluster: LoraCluster) -> None:
    prompt = adapters.tokenizer().encode("Some words that were not sent before, and a few more of them. " * 4)

    def cached(model: str) -> int:
        answer = cluster.send_request(model, prompt, 1)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in ("m", "tuned", "other")] == [0, 0, 0]
    for name in ("m", "tuned", "other"):
        wait_until(lambda name=name: cached(name) > 0, "the router never heard of the blocks")  # type: ignore[misc]


def test_adapter_requests_go_to_workers_that_loaded_it_until_unloaded(cluster: LoraCluster) -> None:
    path = adapters.write(cluster.folder / "third", 3, ("down_proj",))
    assert cluster.systems[0].load("third", str(path))["status"] == "success"
    wait_until(lambda: "third" in cluster.models(), "the adapter is not listed")
    want = adapters.greedily(adapters.merged(3, ("down_proj",)), prompts()[0], COUNT)
    assert {text(cluster.send_request("third", prompts()[0])) for _ in range(6)} == {want}
    assert cluster.systems[1].unload("third")["status"] == "error"
    assert cluster.systems[0].unload("third")["status"] == "success"
    wait_until(lambda: "third" not in cluster.models(), "the adapter is still listed")
    assert cluster.send_request("third", prompts()[0]).status_code == 404
    refused = cluster.systems[0].http.delete("/v1/loras/third")
    assert refused.status_code == 400, "upstream's controller asks again"


def test_adapter_download_from_an_object_store_is_atomic(cluster: LoraCluster) -> None:
    with cluster.store as store:
        for path in cluster.paths["other"].iterdir():
            store.objects[f"/adapters/other/{path.name}"] = path.read_bytes()
        store.cut = 1000
        torn = cluster.systems[0].load("far", "s3://adapters/other")
        assert torn["status"] == "error"
        assert "body error" in torn["message"]
        store.cut = None
        assert cluster.systems[0].load("far", "s3://adapters/other")["status"] == "success"
        assert "DYN_LORA_ENABLED" in cluster.systems[1].load("far", "s3://adapters/other")["message"]
    wait_until(lambda: "far" in cluster.models(), "the adapter is not listed")
    assert text(cluster.send_request("far", prompts()[0])) == text(cluster.send_request("other", prompts()[0]))
    assert cluster.systems[0].unload("far")["status"] == "success"
    assert cluster.systems[0].load("far", "s3://adapters/other")["status"] == "success", "it is kept on disk"
    assert cluster.systems[0].unload("far")["status"] == "success"


def test_no_request_is_lost_while_adapters_are_loaded_and_unloaded(cluster: LoraCluster) -> None:
    want = {name: text(cluster.send_request(name, prompts()[0])) for name in ("m", "tuned")}
    over = threading.Event()
    wrong: list[str] = []
    requested = [0]

    def keep_asking(name: str) -> None:
        while not over.is_set():
            answer = cluster.send_request(name, prompts()[0])
            requested[0] += 1
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != want[name]:
                wrong.append(f"{name}: {answer.status_code} {answer.text}")

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(keep_asking, name) for name in ("m", "tuned", "m", "tuned")]
        try:
            for _ in range(3):
                for system in cluster.systems:  # Meanwhile the other worker has it.
                    assert system.unload("tuned")["status"] == "success"
                    assert system.load("tuned", str(cluster.paths["tuned"]))["status"] == "success"
                    wait_until(lambda system=system: "tuned" in system.loaded(), "it was not loaded")  # type: ignore[misc]
                    until = requested[0] + 8
                    wait_until(lambda until=until: requested[0] > until, "the requests stand still")  # type: ignore[misc]
        finally:
            over.set()
        for one in running:
            one.result(DEADLINE_S)
    assert not wrong, wrong[:3]
