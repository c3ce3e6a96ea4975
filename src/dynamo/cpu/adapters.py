"""Adapters: the LoRA adapters of one engine, loaded off the event loop and looked up by name (docs/lora.md)."""

import asyncio
from collections.abc import Mapping

from dynamo.backend.adapters import LoadedAdapters
from dynamo.cpu.adapter import Adapter
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.lora import read_adapter


class Adapters(LoadedAdapters[Adapter]):
    """LoRA adapters for the model in one directory."""

    def __init__(self, config: CpuConfig, shape: Architecture) -> None:
        super().__init__(
            self._read,
            slots=config.max_loras if config.enable_lora else None,
            count_max=config.max_cpu_loras,
        )
        self._rank_max = config.max_lora_rank
        self._shape = shape
        self._model_path = config.directory
        self._paths: dict[str, str] = {}
        self.exchanging = asyncio.Lock()
        """Held while the model's weights are replaced, so that no adapter is loaded for the previous weights."""

    async def reread(self, model_path: str) -> dict[str, Adapter]:
        """Load the same adapters for other weights of the model. Raise `ConfigError`."""
        return {
            name: await asyncio.to_thread(self._made, name, number, self._paths[name], model_path)
            for name, number in self.ids.items()
        }

    def rebase(self, model_path: str, adapters: Mapping[str, Adapter]) -> None:
        """Switch to the weights of this directory and to the adapters loaded for them."""
        self._model_path = model_path
        self.replace(adapters)

    async def _read(self, name: str, number: int, path: str) -> Adapter:
        async with self.exchanging:
            found = await asyncio.to_thread(self._made, name, number, path, self._model_path)
        self._paths[name] = path
        return found

    def _made(self, name: str, number: int, path: str, model_path: str) -> Adapter:
        return read_adapter(path, name, number, model_path=model_path, shape=self._shape, rank_max=self._rank_max)
