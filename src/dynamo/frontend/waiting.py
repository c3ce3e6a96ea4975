"""Unsupported flags: flags of upstream that this frontend recognises and does not implement. Pure."""

from collections.abc import Collection, Mapping, Sequence

from dynamo.core import waiting
from dynamo.core.waiting import Waiting

WAITING: tuple[Waiting, ...] = (
    Waiting("--kv-cache-block-size", "DYN_KV_CACHE_BLOCK_SIZE", "", hint="workers publish their block size"),
    Waiting("--exclude-tools-when-tool-choice-none", "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", True),
    Waiting("--dyn-chat-processor", "DYN_CHAT_PROCESSOR", "dynamo"),
    Waiting("--dyn-debug-perf", "DYN_DEBUG_PERF", False),
    Waiting("--dyn-preprocess-workers", "DYN_PREPROCESS_WORKERS", "0"),
    Waiting("--trust-remote-code", "DYN_TRUST_REMOTE_CODE", False),
    Waiting("LoRA allocation", "DYN_LORA_ALLOCATION_ENABLED", False, hint="load adapters at workers (docs/lora.md)"),
)


def without_waiting(argv: Sequence[str], variables: Mapping[str, str], declared: Collection[str]) -> list[str]:
    """Return the command line without unsupported flags at their default. Raises `ConfigError` for others."""
    return waiting.without_waiting(WAITING, argv, variables, declared)
