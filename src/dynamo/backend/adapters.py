"""Adapters: LoRA adapters that are loaded and unloaded while a worker serves, each a model of its own (serving-plane.md §3.9).

    POST /v1/loras {"lora_name", "source": {"uri"}}   DELETE /v1/loras/{name}   GET /v1/loras      of the system port
    load_lora, unload_lora, list_loras                                              of the worker's component

An adapter's card is the base model's under another name, so that a frontend lists it and its requests say which it is.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from dynamo.core.config import read_bool, setting
from dynamo.core.errors import DynamoException, InvalidArgument
from dynamo.llm.hub import resolve_model
from dynamo.llm.model_card import slug_of
from dynamo.protocols.model_card import ModelDeploymentCard

logger = logging.getLogger(__name__)

ROUTES = ("load_lora", "unload_lora", "list_loras")


class AdapterEngine(Protocol):
    """What an engine with adapters hands over."""

    @property
    def ids(self) -> Mapping[str, int]:
        """The number of each loaded adapter by its name."""

    @property
    def slots(self) -> int | None:
        """How many of them one step can use, where there is a limit."""

    async def load(self, name: str, path: str) -> int:
        """The adapter's number; loading one that is loaded changes nothing. Raises `InvalidArgument`."""

    async def unload(self, name: str) -> int:
        """The adapter's number. Raises `NotFound`."""


Announce = Callable[[str, ModelDeploymentCard], Awaitable[None]]
"""Publishes a card under an adapter's slug."""
Withdraw = Callable[[str], Awaitable[None]]


class AdapterService:
    """The adapters of one worker: in its engine, and among the models that frontends know."""

    def __init__(
        self, engine: AdapterEngine, base: ModelDeploymentCard, announce: Announce, withdraw: Withdraw
    ) -> None:
        self._engine = engine
        self._base = base
        self._announce = announce
        self._withdraw = withdraw
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]:
        """By the names of their endpoints."""
        return {"load_lora": self.load, "unload_lora": self.unload, "list_loras": self.listed}

    async def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Loads an adapter and announces it; what goes wrong is the answer."""
        try:
            name, uri = _text(body, "lora_name"), _text(body.get("source") or {}, "uri")
            if name == self._base.display_name:
                raise InvalidArgument(f"lora_name {name!r} is the base model's")
            async with self._one_at_a_time:
                path = await asyncio.to_thread(resolve_adapter, uri)
                number = await self._engine.load(name, path)
                await self._announce(slug_of(name), self._card(name, number))
        except DynamoException as error:
            return {"status": "error", "message": str(error)}
        logger.info("LoRA adapter %s loaded from %s", name, uri)
        message = f"LoRA adapter '{name}' loaded successfully"
        return {"status": "success", "message": message, "lora_name": name, "lora_id": number, "hot_swap": False}

    async def unload(self, body: dict[str, Any]) -> dict[str, Any]:
        """Takes an adapter away from frontends, then from the engine."""
        try:
            name = _text(body, "lora_name")
            async with self._one_at_a_time:
                if name in self._engine.ids:
                    await self._withdraw(slug_of(name))
                number = await self._engine.unload(name)
        except DynamoException as error:
            return {"status": "error", "message": str(error)}
        logger.info("LoRA adapter %s unloaded", name)
        message = f"LoRA adapter '{name}' unloaded successfully"
        return {"status": "success", "message": message, "lora_name": name, "lora_id": number}

    async def listed(self, _body: dict[str, Any]) -> dict[str, Any]:
        """What is loaded."""
        return {"status": "success", "loras": dict(self._engine.ids), "count": len(self._engine.ids)}

    async def leave(self) -> None:
        """Nobody finds the adapters any more; they stay loaded."""
        for name in self._engine.ids:
            await self._withdraw(slug_of(name))

    async def join(self) -> None:
        """They are found again."""
        for name, number in self._engine.ids.items():
            await self._announce(slug_of(name), self._card(name, number))

    def _card(self, name: str, number: int) -> ModelDeploymentCard:
        lora: dict[str, Any] = {"name": name}
        if self._engine.slots is not None:
            lora["max_gpu_lora_count"] = self._engine.slots
        return msgspec.structs.replace(
            self._base,
            display_name=name,
            slug=slug_of(name),
            model_aliases=UNSET,
            lora=lora,
            user_data={"lora_adapter": True, "lora_id": number},
        )


def resolve_adapter(uri: str) -> str:
    """The local directory of an adapter: `file://` and paths as they are, `hf://org/model` downloaded.

    Raises `InvalidArgument` for what is not there, and for other schemes.
    """
    scheme, found, rest = uri.partition("://")
    if not found or scheme == "file":
        path = rest if found else uri
        if not os.path.isdir(path):
            raise InvalidArgument(f"{uri}: no such directory")
        return path
    if not setting("DYN_LORA_ENABLED", False, read_bool):
        raise InvalidArgument(f"{uri}: adapters are fetched only where DYN_LORA_ENABLED=true")
    if scheme == "hf":
        return resolve_model(rest)
    raise InvalidArgument(f"{uri}: expected file:// or hf://")


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name) if isinstance(body, Mapping) else None
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name} is {value!r}, expected text")
    return value
