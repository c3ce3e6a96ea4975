"""Adapters: loaded into the engine, and announced as models."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from dynamo.backend.adapter_files import AdapterFiles
from dynamo.backend.adapters import AdapterService
from dynamo.core.errors import InvalidArgument, NotFound
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


async def test_an_adapter_is_a_model_with_the_base_models_files(tmp_path: Path) -> None:
    cluster = Cluster()
    found = await cluster.service.load({"lora_name": "tuned", "source": {"uri": f"file://{tmp_path}"}})
    assert (found["status"], found["lora_id"]) == ("success", 5)
    (card,) = cluster.cards.values()
    assert (card.display_name, card.lora) == ("tuned", {"name": "tuned", "max_gpu_lora_count": 4})
    assert not card.model_aliases
    assert (await cluster.service.listed({}))["loras"] == {"tuned": 5}
    assert (await cluster.service.unload({"lora_name": "tuned"}))["status"] == "success"
    assert cluster.cards == {}


async def test_adapters_leave_and_come_back_with_their_worker(tmp_path: Path) -> None:
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
async def test_what_is_missing_is_named(body: dict[str, object]) -> None:
    cluster = Cluster()
    assert (await cluster.service.load(body))["status"] == "error"
    assert cluster.cards == {}


async def test_what_is_not_loaded_cannot_be_unloaded() -> None:
    assert (await Cluster().service.unload({"lora_name": "a"}))["status"] == "error"


def test_where_adapters_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert AdapterFiles().hold(f"file://{tmp_path}") == str(tmp_path)
    with pytest.raises(InvalidArgument, match="no such directory"):
        AdapterFiles().hold("file:///nowhere/at/all")
    with pytest.raises(InvalidArgument, match="DYN_LORA_ENABLED"):
        AdapterFiles().hold("hf://a/b")
    monkeypatch.setenv("DYN_LORA_ENABLED", "true")
    with pytest.raises(InvalidArgument, match="expected file"):
        AdapterFiles().hold("ftp://a/b")
