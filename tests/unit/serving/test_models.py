"""Served models: a published model becomes servable, for every publisher and despite failures."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.settle import turns, until

from dynamo.core.codec import json_encode
from dynamo.core.errors import CannotConnect, DynamoException, InvalidArgument, NotFound, NotReady
from dynamo.core.metrics import MetricsRegistry
from dynamo.model_card.asset_cache import AssetCache
from dynamo.model_card.assets import moved, self_hosted
from dynamo.model_card.card import build_card
from dynamo.protocols.discovery import INSTANCES, MODEL_CARDS, EndpointId, Instance, TransportAddress, record_key
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord, RuntimeConfig
from dynamo.protocols.openai import decode_chat
from dynamo.routing.python_config import KvRouterConfig, RouterConfig
from dynamo.routing.settings import DisaggregationOptions
from dynamo.runtime.discovery.base import Change
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.push_router import RouterMode
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.models import Models

ENDPOINT = EndpointId("ns", "backend", "generate")


class Fragile(MemoryDiscovery):
    """Registry whose watch of cards fails at its next change on demand; that change is lost."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.breaks = False

    async def watch(self, bucket: str) -> AsyncIterator[Change]:  # type: ignore[override]
        async for change in super().watch(bucket):
            if self.breaks and bucket == MODEL_CARDS:
                self.breaks = False
                raise ValueError("the watch broke")
            yield change


class Worker:
    """A worker that serves a card's files: its directory, reached as if over HTTP."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_up = True
        self.received_requests = 0

    def show(self, path: str, file: str) -> str | None:
        return f"http://worker{path}"


class FakeCache(AssetCache):
    """Fetches from `Worker` without a network."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def localise(self, card: ModelDeploymentCard) -> ModelDeploymentCard:
        self.worker.received_requests += 1
        if not self.worker.is_up:
            raise CannotConnect("the worker does not answer")
        return moved(card, lambda name, file: str(self.worker.directory / file.path.rsplit("/", 1)[-1]))


class ModelsHarness:
    def __init__(self, model_dir: Path) -> None:
        self.discovery = Fragile()
        self.runtime = DistributedRuntime(None, self.discovery, "mem", event_plane="mem")
        self.worker = Worker(model_dir)
        self.metrics = FrontendMetrics(MetricsRegistry())
        self.models = Models(self.runtime, self.metrics, router_mode="round-robin", assets=FakeCache(self.worker))

    async def publish(self, card: ModelDeploymentCard, instance_id: int = 1) -> str:
        key = record_key(ENDPOINT, instance_id)
        record = ModelRecord(
            namespace="ns", component="backend", endpoint="generate", instance_id=instance_id, card_json=card
        )
        await self.discovery.put(MODEL_CARDS, key, json_encode(record))
        return key

    def names(self) -> list[str]:
        return [one.name for one in self.models.all_sets()]


@pytest.fixture
async def harness(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelsHarness]:
    monkeypatch.setattr("dynamo.serving.card_fetches.FETCH_FIRST_S", 0.001)
    monkeypatch.setattr("dynamo.core.tasks.RESTART_FIRST_S", 0.001)
    monkeypatch.setattr("dynamo.core.tasks.PROVEN_S", 0.001)
    made = ModelsHarness(model_dir)
    yield made
    await made.models.close()
    await made.runtime.shutdown()


def instance(instance_id: int) -> Instance:
    address = TransportAddress(tcp=f"127.0.0.1:{instance_id}/{instance_id:x}/ns/backend/generate")
    return Instance("backend", "generate", "ns", instance_id, address)


def local_card(model_dir: Path, name: str = "tiny") -> ModelDeploymentCard:
    return build_card(str(model_dir), name, context_length=512, kv_cache_block_size=16)


async def test_model_with_url_card_is_served_after_its_files_are_downloaded(
    harness: ModelsHarness, model_dir: Path
) -> None:
    await harness.publish(self_hosted(local_card(model_dir), ENDPOINT, harness.worker.show, wanted=True))
    harness.models.start()
    await harness.models.wait_synced(5)
    assert harness.names() == ["tiny"]


async def test_worker_without_files_does_not_block_other_models(harness: ModelsHarness, model_dir: Path) -> None:
    harness.worker.is_up = False
    harness.models.start()
    await harness.publish(self_hosted(local_card(model_dir, "silent"), ENDPOINT, harness.worker.show, wanted=True), 1)
    await until(lambda: harness.worker.received_requests > 2)
    await harness.publish(local_card(model_dir, "other"), 2)
    await until(lambda: harness.names() == ["other"])
    harness.worker.is_up = True
    await until(lambda: sorted(harness.names()) == ["other", "silent"])


async def test_departed_worker_receives_no_more_file_requests(harness: ModelsHarness, model_dir: Path) -> None:
    harness.worker.is_up = False
    harness.models.start()
    card = self_hosted(local_card(model_dir), ENDPOINT, harness.worker.show, wanted=True)
    key = await harness.publish(card)
    await until(lambda: harness.worker.received_requests > 0)
    await harness.discovery.delete(MODEL_CARDS, key)
    harness.worker.is_up = True
    await harness.publish(local_card(model_dir, "other"), 2)
    await until(lambda: harness.names() == ["other"])
    with pytest.raises(NotFound):
        harness.models.find("tiny", "Chat")


async def test_replicas_with_an_equal_card_receive_no_file_requests(harness: ModelsHarness, model_dir: Path) -> None:
    harness.models.start()
    card = self_hosted(local_card(model_dir), ENDPOINT, harness.worker.show, wanted=True)
    await harness.publish(card, 1)
    await until(lambda: harness.names() == ["tiny"])
    requested = harness.worker.received_requests
    await harness.publish(card, 2)
    await until(lambda: len(harness.models.all_sets()[0].records) == 2)
    assert harness.worker.received_requests == requested


async def test_crashed_model_watch_is_restarted_reported_and_removes_departed_models(
    harness: ModelsHarness, model_dir: Path
) -> None:
    harness.models.start()
    key = await harness.publish(local_card(model_dir, "left"), 1)
    await harness.publish(local_card(model_dir, "stayed"), 2)
    await until(lambda: sorted(harness.names()) == ["left", "stayed"])
    harness.discovery.breaks = True
    await harness.discovery.delete(MODEL_CARDS, key)
    await until(lambda: not harness.runtime.health.is_sound())
    assert sorted(harness.names()) == ["left", "stayed"]
    await until(lambda: harness.names() == ["stayed"])
    await until(harness.runtime.health.is_sound)


async def test_model_set_keeps_its_name_after_the_model_was_removed(harness: ModelsHarness, model_dir: Path) -> None:
    key = await harness.publish(local_card(model_dir))
    harness.models.start()
    await harness.models.wait_synced(5)
    (served,) = harness.models.all_sets()
    await harness.discovery.delete(MODEL_CARDS, key)
    await until(lambda: harness.names() == [])
    assert served.name == "tiny"


async def test_chat_preparation_time_is_recorded_on_and_off_the_loop(harness: ModelsHarness, model_dir: Path) -> None:
    harness.models.start()
    await harness.publish(local_card(model_dir))
    await until(lambda: harness.names() == ["tiny"])
    preprocessor = harness.models.all_sets()[0].preprocessor
    for words in (1, 4000):  # The second is long enough for a thread.
        messages = [{"role": "user", "content": "hello " * words}]
        body = json_encode({"model": "tiny", "messages": messages, "max_tokens": 1})
        with contextlib.suppress(InvalidArgument):  # It is too long for the model as well.
            await preprocessor.chat_async(decode_chat(body))
    await turns()
    text = harness.metrics.registry.render()
    for name in ("dynamo_frontend_template_seconds_count 2", "dynamo_frontend_tokenize_seconds_count 2"):
        assert name in text
    tokenizer = preprocessor.tokenizer
    assert f"dynamo_frontend_tokenizer_cache_hits_total {tokenizer.cache_hits}\n" in text
    assert f"dynamo_frontend_tokenizer_cache_misses_total {tokenizer.cache_misses}\n" in text


async def test_models_close_does_not_wait_for_a_hanging_worker(harness: ModelsHarness, model_dir: Path) -> None:
    hung, begun = threading.Event(), threading.Event()

    def hang(card: ModelDeploymentCard) -> ModelDeploymentCard:
        begun.set()
        hung.wait(5)
        return card

    harness.models._assets.localise = hang  # type: ignore[method-assign]
    harness.models.start()
    await harness.publish(self_hosted(local_card(model_dir), ENDPOINT, harness.worker.show, wanted=True))
    await until(begun.is_set)
    async with asyncio.timeout(1):
        await harness.models.close()
    hung.set()


class Fleet:
    """A worker that receives a request."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, body: bytes, receiver: object, **options: object) -> "Fleet":
        self.sent.append(str(options["request_id"]))
        return self

    async def close(self) -> None: ...

    def on_change(self, callback: object) -> None: ...

    def instance_ids(self) -> list[int]:
        return []


@pytest.mark.parametrize("same_card", [True, False])
async def test_stream_continues_on_the_new_model_set_only_with_an_equal_card(
    harness: ModelsHarness, model_dir: Path, same_card: bool
) -> None:
    key = await harness.publish(local_card(model_dir))
    harness.models.start()
    await harness.models.wait_synced(5)
    (old,) = harness.models.all_sets()
    await harness.discovery.delete(MODEL_CARDS, key)
    await until(lambda: harness.names() == [])
    card = local_card(model_dir)
    card.context_length = 512 if same_card else 256
    await harness.publish(card, 2)
    await until(lambda: harness.names() == ["tiny"])
    (new,) = harness.models.all_sets()
    new.client, old.client = Fleet(), Fleet()  # type: ignore[assignment]
    await old.send(b"", None, request_id="r", instance_id=None, headers={}, exclude=frozenset())  # type: ignore[arg-type]
    fleets = (new.client, old.client)
    assert [fleet.sent for fleet in fleets] == ([["r"], []] if same_card else [[], ["r"]])  # type: ignore[attr-defined]


class Loads:
    """A subscriber without events that notes its end."""

    def __init__(self) -> None:
        self.is_closed = False

    def __aiter__(self) -> "Loads":
        return self

    async def __anext__(self) -> object:
        await asyncio.Event().wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        self.is_closed = True


async def test_cancelled_load_listener_closes_its_subscription(harness: ModelsHarness, model_dir: Path) -> None:
    await harness.publish(local_card(model_dir))
    harness.models.start()
    await harness.models.wait_synced(5)
    (served,) = harness.models.all_sets()
    loads = Loads()
    listening = asyncio.create_task(served.listen(loads))  # type: ignore[arg-type]
    await turns()
    listening.cancel()
    await asyncio.wait({listening})
    assert loads.is_closed


@pytest.mark.parametrize("wrong", [{}, {"router_policy_config": "nowhere.yaml"}])
async def test_model_card_configures_the_kv_router_of_its_workers(
    harness: ModelsHarness, model_dir: Path, wrong: dict[str, str]
) -> None:
    harness.models.start()
    card = local_card(model_dir)
    kv = KvRouterConfig(router_temperature=0.5, router_queue_threshold=3.0)
    card.router_config = RouterConfig(RouterMode.KV, kv).on_card()
    card.router_config["kv_router_config"] |= wrong
    await harness.publish(card)
    await until(lambda: harness.names() == ["tiny"])
    (served,) = harness.models.all_sets()
    assert served.kv is not None, "though the frontend's own mode is round-robin"
    config = served.kv.config
    assert config.block_size == 16
    output = (config.weights.router_temperature, config.queue_threshold)
    assert output == ((0.0, None) if wrong else (0.5, 3.0)), "what cannot be used is the frontend's own"


async def test_model_alias_is_listed_and_resolved_unless_a_model_has_that_name(
    harness: ModelsHarness, model_dir: Path
) -> None:
    harness.models.start()
    card = local_card(model_dir)
    card.model_aliases = ["small", "other"]
    await harness.publish(card)
    await harness.publish(local_card(model_dir, "other"), instance_id=2)
    await until(lambda: sorted(harness.names()) == ["other", "tiny"])
    tiny, other = (next(one for one in harness.models.all_sets() if one.name == name) for name in ("tiny", "other"))
    for instance_id, one in enumerate((tiny, other), 1):
        one.client.instance_ids = lambda instance_id=instance_id: [instance_id]  # type: ignore[method-assign, misc]
    assert harness.models.listed() == {"tiny": [tiny], "small": [tiny], "other": [other]}
    assert set(harness.models.served()) == {"tiny", "other"}
    assert harness.models.find("small", "Chat") is tiny
    assert harness.models.find("other", "Chat") is other


async def test_model_without_workers_is_not_ready_at_first_and_later_not_found(
    harness: ModelsHarness, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client repeats 503; 404 would be for good."""
    harness.models.start()
    card = local_card(model_dir)
    card.model_aliases = ["small"]
    key = await harness.publish(card)
    await until(lambda: harness.names() == ["tiny"])
    await harness.discovery.delete(MODEL_CARDS, key)
    await until(lambda: harness.names() == [])
    for name in ("tiny", "small"):
        with pytest.raises(NotReady, match="has no worker at the moment"):
            harness.models.find(name, "Chat")
    with pytest.raises(NotFound):
        harness.models.find("another", "Chat")
    harness.models._sets["tiny", str(ENDPOINT)] = Mock(checksum="")  # It is back, and its tokenizer is being loaded.
    with pytest.raises(NotReady):
        harness.models.find("tiny", "Chat")
    del harness.models._sets["tiny", str(ENDPOINT)]
    monkeypatch.setattr("dynamo.serving.model_lookup.DEPARTED_S", 0.0)
    with pytest.raises(NotFound):
        harness.models.find("tiny", "Chat")


async def test_model_removed_by_its_running_worker_is_not_found(harness: ModelsHarness, model_dir: Path) -> None:
    """The worker serves another model on, as after an adapter was unloaded."""
    harness.models.start()
    key = await harness.publish(local_card(model_dir, "adapter"), 1)
    await harness.publish(local_card(model_dir, "base"), 2)
    await until(lambda: sorted(harness.names()) == ["adapter", "base"])
    await harness.discovery.delete(MODEL_CARDS, key)
    await until(lambda: harness.names() == ["base"])
    with pytest.raises(NotFound):
        harness.models.find("adapter", "Chat")


@pytest.mark.parametrize("damaged", [b"", b"{nonsense", b"\xff\xfe", b'{"a":' * 100_000])
async def test_model_with_a_damaged_card_is_still_served(
    harness: ModelsHarness, model_dir: Path, damaged: bytes
) -> None:
    harness.models.start()
    key = await harness.publish(local_card(model_dir), 1)
    await until(lambda: harness.names() == ["tiny"])
    await harness.discovery.put(MODEL_CARDS, key, damaged)
    await harness.publish(local_card(model_dir, "other"), 2)
    await until(lambda: sorted(harness.names()) == ["other", "tiny"])
    assert harness.models._tasks.is_sound


async def test_requests_are_sent_only_to_workers_of_their_model(harness: ModelsHarness, model_dir: Path) -> None:
    harness.models.start()
    for instance_id in (1, 2, 3):
        await harness.discovery.put(INSTANCES, record_key(ENDPOINT, instance_id), json_encode(instance(instance_id)))
    await harness.publish(local_card(model_dir, "one"), 1)
    two = await harness.publish(local_card(model_dir, "two"), 2)
    await harness.publish(local_card(model_dir, "two"), 3)
    await until(lambda: len(harness.names()) == 2)
    one = harness.models.find("one", "Chat")
    await until(lambda: len(one.client.instance_ids()) == 3)
    await until(lambda: sorted(harness.models.find("two", "Chat").worker_ids()) == [2, 3])
    await until(lambda: one.worker_ids() == [1])
    await harness.discovery.delete(MODEL_CARDS, two)
    await until(lambda: len(harness.models.find("two", "Chat").records) == 1)
    assert one.worker_ids() == [1], "it is about to leave"
    await harness.publish(local_card(model_dir, "one"), 2)
    await until(lambda: sorted(one.worker_ids()) == [1, 2])


async def test_worker_whose_card_cannot_be_fetched_gets_no_requests_for_another_model_of_its_endpoint(
    harness: ModelsHarness, model_dir: Path
) -> None:
    harness.worker.is_up = False
    harness.models.start()
    for instance_id in (1, 2):
        await harness.discovery.put(INSTANCES, record_key(ENDPOINT, instance_id), json_encode(instance(instance_id)))
    await harness.publish(local_card(model_dir, "one"), 1)
    remote = self_hosted(local_card(model_dir, "two"), ENDPOINT, harness.worker.show, wanted=True)
    await harness.publish(remote, 2)
    await until(lambda: harness.worker.received_requests > 1)
    one = harness.models.find("one", "Chat")
    await until(lambda: len(one.client.instance_ids()) == 2)
    assert one.worker_ids() == [1]
    harness.worker.is_up = True
    await until(lambda: sorted(harness.names()) == ["one", "two"])
    assert harness.models.find("two", "Chat").worker_ids() == [2]
    assert one.worker_ids() == [1]


# Prefill and decode.


class Cluster(ModelsHarness):
    """Workers of all roles start and stop while a request is looked up."""

    def __init__(self, model_dir: Path, *, enforced: bool = False) -> None:
        super().__init__(model_dir)
        self.models = Models(
            self.runtime,
            self.metrics,
            router_mode="round-robin",
            assets=FakeCache(self.worker),
            disaggregation=DisaggregationOptions(enforce_disagg=enforced),
        )
        self.model_dir = model_dir

    async def come(self, role: str, instance_id: int, *, namespace: str = "ns", local: bool = False) -> EndpointId:
        component = "prefill" if role == "prefill" else "backend"
        endpoint = EndpointId(namespace, component, "generate")
        card = build_card(
            str(self.model_dir),
            "tiny",
            context_length=512,
            kv_cache_block_size=16,
            model_type="" if role == "prefill" else "Chat | Completions",
            worker_type=role,
            needs=[["decode"]] if role == "prefill" else [["prefill"]],
            runtime_config=RuntimeConfig(runtime_data={"local_prefill": True} if local else {}),
        )
        record = ModelRecord(
            namespace=namespace, component=component, endpoint="generate", instance_id=instance_id, card_json=card
        )
        address = TransportAddress(tcp=f"127.0.0.1:{instance_id}/{instance_id:x}/{endpoint.path}")
        one = Instance(component, "generate", namespace, instance_id, address)
        await self.discovery.put(INSTANCES, record_key(endpoint, instance_id), json_encode(one))
        await self.discovery.put(MODEL_CARDS, record_key(endpoint, instance_id), json_encode(record))
        return endpoint

    async def go(self, endpoint: EndpointId, instance_id: int) -> None:
        for bucket in (INSTANCES, MODEL_CARDS):
            await self.discovery.delete(bucket, record_key(endpoint, instance_id))

    def what(self) -> str:
        """Return the outcome of a request now."""
        try:
            return self.models.find("tiny", "Chat").worker_type
        except DynamoException as error:
            return type(error).__name__


@contextlib.asynccontextmanager
async def cluster(model_dir: Path, *, enforced: bool = False) -> AsyncIterator[Cluster]:
    made = Cluster(model_dir, enforced=enforced)
    made.models.start()
    yield made
    await made.models.close()
    await made.runtime.shutdown()


async def test_disaggregated_model_is_ready_once_both_roles_are_present(model_dir: Path) -> None:
    async with cluster(model_dir) as there:
        assert there.what() == "NotFound"
        await there.come("decode", 1)
        await until(lambda: there.what() == "NotReady")
        assert there.models.served() == {}
        prefill = await there.come("prefill", 2)
        await until(lambda: there.what() == "decode")
        assert [one.worker_type for one in there.models.all_sets()] == ["decode"]
        assert sorted(one.worker_type for one in there.models.every_set()) == ["decode", "prefill"]
        assert list(there.models.served()) == ["tiny"]
        await there.go(prefill, 2)
        await until(lambda: there.what() == "NotReady")
        await there.come("prefill", 3)
        await until(lambda: there.what() == "decode")


async def test_model_with_only_prefill_workers_is_not_found(model_dir: Path) -> None:
    async with cluster(model_dir) as there:
        await there.come("prefill", 2)
        await until(lambda: bool(there.models.every_set()))
        assert there.what() == "NotFound"


async def test_prefill_workers_of_another_namespace_are_not_used(model_dir: Path) -> None:
    async with cluster(model_dir) as there:
        await there.come("decode", 1)
        await there.come("prefill", 2, namespace="other")
        await until(lambda: len(there.models.every_set()) == 2)
        assert there.what() == "NotReady"


@pytest.mark.parametrize(("enforced", "what"), [(False, "decode"), (True, "NotReady")])
async def test_decode_workers_with_local_prefill_serve_alone_unless_disaggregation_is_enforced(
    model_dir: Path, enforced: bool, what: str
) -> None:
    async with cluster(model_dir, enforced=enforced) as there:
        await there.come("decode", 1, local=True)
        await until(lambda: there.what() == what)


async def test_model_name_above_the_limit_is_not_repeated_in_the_error(harness: ModelsHarness) -> None:
    with pytest.raises(NotFound, match="the name has 2000000 characters; at most 1024 are allowed") as refused:
        harness.models.find("x" * 2_000_000, "Chat")
    assert len(str(refused.value)) < 200
