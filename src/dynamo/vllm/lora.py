"""Adapters: the LoRA adapters that an engine has loaded."""

from typing import Any

from dynamo.backend.adapters import LoadedAdapters
from dynamo.core.errors import InvalidArgument


def adapters_of(llm: Any, make: Any, settings: Any) -> LoadedAdapters[Any]:
    """Return the adapter operations. `make` is vLLM's `LoRARequest`, `settings` its `LoRAConfig` or None.

    vLLM identifies adapters by number; the number is derived from the name, so that it is the same on every worker.
    """

    async def take(name: str, number: int, path: str) -> Any:
        request = make(lora_name=name, lora_int_id=number, lora_path=path)
        if await llm.add_lora(request) is False:
            raise InvalidArgument(f"{path}: the engine rejected the adapter")
        return request

    async def drop(request: Any) -> None:
        await llm.remove_lora(request.lora_int_id)

    return LoadedAdapters(take, drop, slots=None if settings is None else settings.max_loras)
