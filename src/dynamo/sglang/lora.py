"""Adapters: LoRA adapters as SGLang loads them: by name, which is also how a request asks for one."""

from typing import Any

from dynamo.backend.adapters import LoadedAdapters
from dynamo.core.errors import InvalidArgument


def adapters_of(engine: Any, args: Any) -> LoadedAdapters[str]:
    """`engine` is SGLang's `Engine`, `args` its `ServerArgs`. Each adapter is its name."""

    async def take(name: str, _number: int, path: str) -> str:
        told = await engine.async_load_lora_adapter(name, path)
        if not told.success:
            raise InvalidArgument(f"{path}: {told.error_message or 'the engine did not take it'}")
        return name

    async def drop(name: str) -> None:
        told = await engine.async_unload_lora_adapter(name)
        if not told.success:
            raise InvalidArgument(f"{name}: {told.error_message or 'the engine keeps it'}")

    return LoadedAdapters(take, drop, slots=args.max_loras_per_batch if args.enable_lora else None)
