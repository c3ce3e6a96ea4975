"""Adapters: LoRA adapters that are loaded and unloaded while a worker serves; each is a model of its own.

    POST /v1/loras {"lora_name", "source": {"uri"}}   DELETE /v1/loras/{name}   GET /v1/loras      of the system port
    load_lora, unload_lora, list_loras                                              of the worker's component

An adapter's card is the base model's under another name, so that frontends list it and requests can select it. An
unloaded adapter leaves discovery first; requests from frontends with an outdated list are still accepted for a short
time, and running requests are completed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET

from dynamo.backend.adapter_files import AdapterFiles
from dynamo.core.boundaries import Rollback
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import ConfigError, DynamoException, InvalidArgument, NotFound, WorkerUnavailable
from dynamo.model_card.card import lora_name_to_id, slug_of
from dynamo.protocols.model_card import ModelDeploymentCard

logger = logging.getLogger(__name__)

HOT_SWAP = "DYN_LORA_HOTSWAP_ENABLED"

A = TypeVar("A")


class AdapterEngine(Protocol):
    """Adapter operations of an engine."""

    @property
    def ids(self) -> Mapping[str, int]:
        """The ids of the loaded adapters by name."""

    @property
    def slots(self) -> int | None:
        """The maximum number of adapters in one step; None for no limit."""

    async def load(self, name: str, path: str) -> int:
        """Load an adapter and return its id; no effect if it is loaded. Raise `InvalidArgument`."""

    async def unload(self, name: str) -> int:
        """Unload an adapter and return its id. Raise `NotFound`."""


class LoadedAdapters(Generic[A]):
    """`AdapterEngine` over an engine's adapter type. Must be called on the loop's thread."""

    def __init__(
        self,
        take: Callable[[str, int, str], Awaitable[A]],
        drop: Callable[[A], Awaitable[None]] | None = None,
        *,
        slots: int | None,
        count_max: int | None = None,
    ) -> None:
        """Set `take`, which loads (name, id, directory), and `drop`, which unloads. `slots` None: no adapters."""
        self._take = take
        self._drop = drop
        self._slots = slots
        self._count_max = count_max
        self._loaded: dict[str, A] = {}

    @property
    def ids(self) -> Mapping[str, int]:
        return {name: lora_name_to_id(name) for name in self._loaded}

    @property
    def slots(self) -> int | None:
        return self._slots

    def of(self, name: str | None) -> A | None:
        """Return a request's adapter; None for the base model. Raise `WorkerUnavailable`: another worker may have it."""
        if not name:
            return None
        found = self._loaded.get(name)
        if found is None:
            raise WorkerUnavailable(f"LoRA adapter {name!r} is not loaded on this worker")
        return found

    async def load(self, name: str, path: str) -> int:
        """Load an adapter; no effect if it is loaded. Raise `InvalidArgument` if the engine rejects it."""
        if self._slots is None:
            raise InvalidArgument("this worker was started without --enable-lora")
        number = lora_name_to_id(name)
        if name in self._loaded:
            return number
        if self._count_max is not None and len(self._loaded) >= self._count_max:
            raise InvalidArgument(
                f"{len(self._loaded)} adapters are loaded, the maximum of --max-cpu-loras: unload one"
            )
        try:
            self._loaded[name] = await self._take(name, number, path)
        except InvalidArgument as error:
            raise InvalidArgument(f"LoRA adapter {name!r}: {error}") from error
        except Exception as error:  # The engine may raise any error for an unusable adapter.
            raise InvalidArgument(f"LoRA adapter {name!r} at {path}: {error}") from error
        return number

    async def unload(self, name: str) -> int:
        """Unload an adapter. Raise `NotFound`."""
        if name not in self._loaded:
            raise NotFound(f"LoRA adapter {name!r} is not loaded on this worker")
        found = self._loaded.pop(name)
        if self._drop is not None:
            await self._drop(found)
        return lora_name_to_id(name)

    def replace(self, loaded: Mapping[str, A]) -> None:
        """Replace the loaded adapters after a weight update; skip those that were unloaded meanwhile."""
        self._loaded |= {name: one for name, one in loaded.items() if name in self._loaded}


Announce = Callable[[str, ModelDeploymentCard], Awaitable[None]]
"""Function that publishes a card under an adapter's slug."""
Withdraw = Callable[[str], Awaitable[None]]


class AdapterService:
    """The LoRA adapters of one worker, in its engine and in discovery."""

    def __init__(
        self,
        engine: AdapterEngine,
        base: ModelDeploymentCard,
        announce: Announce,
        withdraw: Withdraw,
        *,
        settle: Callable[[], Awaitable[None]] | None = None,
        files: AdapterFiles | None = None,
    ) -> None:
        """Set `settle`, which returns when frontends have received a deregistration. Raise `ConfigError`."""
        if setting(HOT_SWAP, False, read_bool):
            raise ConfigError(f"{HOT_SWAP}=true: not supported; unload an adapter before loading another one")
        self._settle = settle
        self._files = files or AdapterFiles()
        self._paths: dict[str, str] = {}
        self._is_found = True
        self._engine = engine
        self._base = base
        self._announce = announce
        self._withdraw = withdraw
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]:
        """The routes by endpoint name."""
        return {"load_lora": self.load, "unload_lora": self.unload, "list_loras": self.listed}

    async def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load an adapter and register it; an error is returned as the response."""
        try:
            name, uri = _text(body, "lora_name"), _text(body.get("source") or {}, "uri")
            if name == self._base.display_name:
                raise InvalidArgument(f"lora_name {name!r} is the base model's")
            async with self._one_at_a_time:
                known = self._engine.ids.get(name)
                number = await self._load(name, uri) if known is None else known
        except DynamoException as error:
            return {"status": "error", "message": str(error)}
        logger.info("LoRA adapter %s %s", name, f"loaded from {uri}" if known is None else "is loaded already")
        message = f"LoRA adapter '{name}' loaded successfully"
        return {"status": "success", "message": message, "lora_name": name, "lora_id": number, "hot_swap": False}

    async def unload(self, body: dict[str, Any]) -> dict[str, Any]:
        """Remove an adapter from discovery, then from the engine."""
        try:
            name = _text(body, "lora_name")
            async with self._one_at_a_time:
                if name in self._engine.ids:
                    await self._withdraw(slug_of(name))
                    if self._settle is not None:
                        await self._settle()
                number = await self._engine.unload(name)
                self._files.release(self._paths.pop(name, ""))
        except DynamoException as error:
            return {"status": "error", "message": str(error)}
        logger.info("LoRA adapter %s unloaded", name)
        message = f"LoRA adapter '{name}' unloaded successfully"
        return {"status": "success", "message": message, "lora_name": name, "lora_id": number}

    async def listed(self, _body: dict[str, Any]) -> dict[str, Any]:
        """List the loaded adapters."""
        return {"status": "success", "loras": dict(self._engine.ids), "count": len(self._engine.ids)}

    async def leave(self) -> None:
        """Remove the adapters from discovery; they stay loaded."""
        self._is_found = False
        for name in self._engine.ids:
            await self._withdraw(slug_of(name))

    async def join(self) -> None:
        """Register the adapters again."""
        self._is_found = True
        for name, number in self._engine.ids.items():
            await self._announce(slug_of(name), self._card(name, number))

    async def _load(self, name: str, uri: str) -> int:
        if any(slug_of(one) == slug_of(name) for one in (self._base.display_name, *self._engine.ids)):
            raise InvalidArgument(f"lora_name {name!r} has the same slug as another model")
        path = await asyncio.to_thread(self._files.hold, uri)
        with Rollback(lambda: self._files.release(path)):
            number = await self._engine.load(name, path)
        self._paths[name] = path
        if self._is_found:
            await self._announce(slug_of(name), self._card(name, number))
        return number

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


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name) if isinstance(body, Mapping) else None
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name} is {value!r}, expected a string")
    return value
