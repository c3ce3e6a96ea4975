"""Adapters: the LoRA adapters of an SGLang engine, which loads and selects them by name."""

from typing import Any

from dynamo.backend.adapters import LoadedAdapters
from dynamo.core.errors import InvalidArgument


def adapters_of(engine: Any, args: Any) -> LoadedAdapters[str]:
    """Return the adapter operations. `engine` is SGLang's `Engine`, `args` its `ServerArgs`; adapters are names."""

    async def take(name: str, _number: int, path: str) -> str:
        result = await engine.async_load_lora_adapter(name, path)
        if not result.success:
            raise InvalidArgument(f"{path}: {result.error_message or 'the engine rejected the adapter'}")
        return name

    async def drop(name: str) -> None:
        result = await engine.async_unload_lora_adapter(name)
        if not result.success:
            raise InvalidArgument(f"{name}: {result.error_message or 'the engine did not unload the adapter'}")

    return LoadedAdapters(take, drop, slots=args.max_loras_per_batch if args.enable_lora else None)
