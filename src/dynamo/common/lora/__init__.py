"""LoRA adapters of workers."""

from dynamo.common.lora.manager import LoRAInfo, LoRAManager, LoRASourceProtocol, get_lora_manager
from dynamo.common.lora.once import OnceLock

__all__ = ["LoRAInfo", "LoRAManager", "LoRASourceProtocol", "OnceLock", "get_lora_manager"]
