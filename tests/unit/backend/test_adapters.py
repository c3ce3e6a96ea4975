"""Adapters: loaded into the engine, and announced as models."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from dynamo.backend.adapters import AdapterService, LoadedAdapters
from dynamo.core.errors import ConfigError, InvalidArgument, NotFound, WorkerUnavailable
from dynamo.model_card.card import lora_name_to_id
from dynamo.protocols.model_card import ModelDeploymentCard


class Engine:
    slots: int | None = 4

    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}

    @property
    def ids(self) -> Mapping[str, int]:
        return self.loaded

    async def load(self, name: str, path: str) -> int:
        self.loaded[name] = 5
        return 5

    async def unload(self, name: str) -> int:
        if name not in self.loaded:
            raise NotFound(f"{name} is not loaded")
        return self.loaded.pop(name)


class Cluster:
    def __init__(self) -> None:
        self.cards: dict[str, ModelDeploymentCard] = {}
        base = ModelDeploymentCard(display_name="base", slug="base", model_aliases=["b"])
        self.service = AdapterService(Engine(), base, self.announce, self.withdraw)

    async def announce(self, suffix: str, card: ModelDeploymentCard) -> None:
        self.cards[suffix] = card

    async def withdraw(self, suffix: str) -> None:
        self.cards.pop(suffix, None)


async def test_loaded_adapter_is_published_as_a_model_with_the_files_of_its_base(tmp_path: Path) -> None:
    cluster = Cluster()
    found = await cluster.service.load({"lora_name": "tuned", "source": {"uri": f"file://{tmp_path}"}})
    assert (found["status"], found["lora_id"]) == ("success", 5)
    (card,) = cluster.cards.values()
    assert (card.display_name, card.lora) == ("tuned", {"name": "tuned", "max_gpu_lora_count": 4})
    assert not card.model_aliases
    assert (await cluster.service.listed({}))["loras"] == {"tuned": 5}
    assert (await cluster.service.unload({"lora_name": "tuned"}))["status"] == "success"
    assert cluster.cards == {}


async def test_adapters_are_unpublished_and_republished_with_their_worker(tmp_path: Path) -> None:
    cluster = Cluster()
    await cluster.service.load({"lora_name": "tuned", "source": {"uri": str(tmp_path)}})
    await cluster.service.leave()
    assert cluster.cards == {}
    await cluster.service.join()
    assert [card.display_name for card in cluster.cards.values()] == ["tuned"]


@pytest.mark.parametrize(
    "body",
    [{}, {"lora_name": "a"}, {"lora_name": "base", "source": {"uri": "/"}}, {"lora_name": "a", "source": {"uri": 3}}],
)
async def test_incomplete_adapter_request_is_an_error(body: dict[str, object]) -> None:
    cluster = Cluster()
    assert (await cluster.service.load(body))["status"] == "error"
    assert cluster.cards == {}


async def test_unknown_adapter_cannot_be_unloaded() -> None:
    assert (await Cluster().service.unload({"lora_name": "a"}))["status"] == "error"


async def test_loaded_adapter_is_not_downloaded_again(tmp_path: Path) -> None:
    cluster = Cluster()
    assert (await cluster.service.load({"lora_name": "a", "source": {"uri": str(tmp_path)}}))["status"] == "success"
    again = await cluster.service.load({"lora_name": "a", "source": {"uri": "file:///nowhere"}})
    assert (again["status"], again["lora_id"], again["hot_swap"]) == ("success", 5, False)


async def test_adapter_names_with_equal_slugs_are_refused(tmp_path: Path) -> None:
    cluster = Cluster()
    assert (await cluster.service.load({"lora_name": "a b", "source": {"uri": str(tmp_path)}}))["status"] == "success"
    assert (
        "same slug" in (await cluster.service.load({"lora_name": "a_b", "source": {"uri": str(tmp_path)}}))["message"]
    )


async def test_adapter_card_is_withdrawn_before_the_engine_unloads(tmp_path: Path) -> None:
    cluster = Cluster()
    engine = Engine()
    seen: list[tuple[set[str], set[str]]] = []

    async def settle() -> None:
        seen.append((set(cluster.cards), set(engine.loaded)))

    base = ModelDeploymentCard(display_name="base", slug="base")
    service = AdapterService(engine, base, cluster.announce, cluster.withdraw, settle=settle)
    await service.load({"lora_name": "a", "source": {"uri": str(tmp_path)}})
    await service.unload({"lora_name": "a"})
    assert seen == [(set(), {"a"})]


async def test_adapter_loaded_during_a_drain_is_published_after_resume(tmp_path: Path) -> None:
    cluster = Cluster()
    await cluster.service.leave()
    await cluster.service.load({"lora_name": "a", "source": {"uri": str(tmp_path)}})
    assert cluster.cards == {}
    await cluster.service.join()
    assert set(cluster.cards) == {"a"}


def test_unsupported_adapter_hot_swap_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LORA_HOTSWAP_ENABLED", "true")
    with pytest.raises(ConfigError, match="DYN_LORA_HOTSWAP_ENABLED"):
        Cluster()


async def test_loaded_adapters_are_bounded_and_resolved_by_name() -> None:
    dropped: list[str] = []

    async def take(name: str, number: int, path: str) -> str:
        if path == "bad":
            raise ValueError("no good")
        return f"{name} at {path}"

    async def drop(one: str) -> None:
        dropped.append(one)

    loaded = LoadedAdapters(take, drop, slots=1, count_max=2)
    assert await loaded.load("a", "1") == await loaded.load("a", "2") == lora_name_to_id("a")
    with pytest.raises(InvalidArgument, match="'b' at bad: no good"):
        await loaded.load("b", "bad")
    await loaded.load("b", "1")
    with pytest.raises(InvalidArgument, match="--max-cpu-loras"):
        await loaded.load("c", "1")
    assert (loaded.of("a"), loaded.of(""), loaded.of(None)) == ("a at 1", None, None)
    loaded.replace({"a": "new", "gone": "old"})
    assert (loaded.of("a"), set(loaded.ids)) == ("new", {"a", "b"})
    await loaded.unload("a")
    assert dropped == ["new"]
    with pytest.raises(WorkerUnavailable):
        loaded.of("a")
    with pytest.raises(NotFound):
        await loaded.unload("a")
