"""Preparation of prompts: what the serving process needs of it before a model is loaded.

The preprocessor itself (`text.preprocessor`) brings the template engine and the tokenizers, which are loaded with the first model.
"""

import asyncio
import threading
from collections.abc import Callable

import msgspec

from dynamo.protocols.engine import Routing
from dynamo.protocols.nvext import NvExt

THREAD_CHARS_MIN = 8192  # About 2,000 tokens, or 2 ms of the library: too long for the event loop.


class Timings:
    """Observer of preprocessing durations, called on its own event loop from any thread."""

    def __init__(self, observe: Callable[[float, float], None]) -> None:
        """`observe` receives the seconds of the template and those of the tokenizer."""
        self.observe = observe
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()


def routing_of(nvext: NvExt | None, cache_salt: str | None = None, lora: str | None = None) -> Routing | None:
    """Return the routing hints and constraints of a request, None if it has none."""
    if nvext is None:
        return Routing(cache_salt=cache_salt, lora_name=lora) if cache_salt or lora else None
    hints = nvext.agent_hints
    routing = Routing(
        backend_instance_id=nvext.backend_instance_id,
        prefill_worker_id=nvext.prefill_worker_id,
        decode_worker_id=nvext.decode_worker_id,
        dp_rank=nvext.dp_rank,
        prefill_dp_rank=nvext.prefill_dp_rank,
        cache_salt=cache_salt,
        lora_name=lora,
        routing_constraints=None
        if nvext.routing_constraints is None
        else msgspec.to_builtins(nvext.routing_constraints),
    )
    if hints is not None:
        routing.expected_output_tokens = hints.osl
        routing.strict_priority = hints.strict_priority
        routing.priority = hints.priority
        routing.priority_jump = None if hints.priority is None else float(max(0, hints.priority))
    return None if routing == Routing() else routing
