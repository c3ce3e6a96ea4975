"""Adapters: the LoRA adapters that an engine has loaded (serving-plane.md §3.9)."""

from typing import Any

from dynamo.backend.adapters import LoadedAdapters
from dynamo.core.errors import InvalidArgument


def adapters_of(llm: Any, make: Any, settings: Any) -> LoadedAdapters[Any]:
    """`make` is vLLM's `LoRARequest`; `settings` its `LoRAConfig`, None where it was started without adapters.

    vLLM knows adapters by number; ours is made of the name, the same everywhere.
    """

    async def take(name: str, number: int, path: str) -> Any:
        request = make(lora_name=name, lora_int_id=number, lora_path=path)
        if await llm.add_lora(request) is False:
            raise InvalidArgument(f"{path}: the engine did not take it")
        return request

    async def drop(request: Any) -> None:
        await llm.remove_lora(request.lora_int_id)

    return LoadedAdapters(take, drop, slots=None if settings is None else settings.max_loras)
