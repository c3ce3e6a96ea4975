"""Adapters: the LoRA adapters that an engine has loaded (serving-plane.md §3.9)."""

from collections.abc import Mapping
from typing import Any

from dynamo.core.errors import InvalidArgument, NotFound
from dynamo.llm.register import lora_name_to_id


class Adapters:
    """Loaded, used by name, and unloaded. vLLM knows them by number; ours is made of the name, the same everywhere."""

    def __init__(self, llm: Any, make: Any, settings: Any) -> None:
        """`make` is vLLM's `LoRARequest`; `settings` its `LoRAConfig`, None where it was started without adapters."""
        self._llm = llm
        self._make = make
        self._settings = settings
        self._loaded: dict[str, Any] = {}

    @property
    def ids(self) -> Mapping[str, int]:
        """The number of each adapter by its name."""
        return {name: one.lora_int_id for name, one in self._loaded.items()}

    @property
    def slots(self) -> int | None:
        """How many of them one step can use; None without adapters."""
        return None if self._settings is None else self._settings.max_loras

    def of(self, name: str | None) -> Any:
        """What vLLM wants for a request; None for the base model. Raises `NotFound`."""
        if not name:
            return None
        found = self._loaded.get(name)
        if found is None:
            raise NotFound(f"LoRA adapter {name!r} is not loaded on this worker")
        return found

    async def load(self, name: str, path: str) -> int:
        """The adapter's number. Raises `InvalidArgument` for one that vLLM does not take, or an engine without any."""
        if self._settings is None:
            raise InvalidArgument("this worker was started without --enable-lora")
        known = self._loaded.get(name)
        if known is not None:
            return int(known.lora_int_id)
        request = self._make(lora_name=name, lora_int_id=lora_name_to_id(name), lora_path=path)
        try:
            is_loaded = await self._llm.add_lora(request)
        except Exception as error:
            raise InvalidArgument(f"LoRA adapter {name!r} at {path}: {error}") from error
        if is_loaded is False:
            raise InvalidArgument(f"LoRA adapter {name!r} at {path}: the engine did not take it")
        self._loaded[name] = request
        return int(request.lora_int_id)

    async def unload(self, name: str) -> int:
        """The adapter's number. Raises `NotFound`."""
        known = self.of(name)
        if known is None:
            raise InvalidArgument("lora_name is missing")
        del self._loaded[name]
        await self._llm.remove_lora(known.lora_int_id)
        return int(known.lora_int_id)
