"""Disaggregation: parameters passed from prefill to decode workers, and protocols of the block transfer. Pure.

`disaggregated_params` contains the location of the blocks (a descriptor of `dynamo.kvbm.transfer`), the token that follows
the prompt, and its log-probabilities if requested. The decode worker emits that token at once, fetches the blocks and continues.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.cpu.generation import Fetch
from dynamo.cpu.sampler import Sampled
from dynamo.kvbm.transfer.base import Deadline, Descriptor, Layout, TransferError
from dynamo.kvbm.transfer.sessions import WHOLE_S, TransferSession
from dynamo.protocols.engine import BootstrapInfo, EngineOutput


class BlockExporter(Protocol):
    """Keep blocks for decode workers. Called on the engine's thread."""

    def export(self, blocks: Sequence[int]) -> Descriptor | None:
        """Export blocks and return their descriptor; return None if no more can be kept."""

    def release_oldest(self) -> None:
        """Release the export that has waited longest, because its blocks are needed."""

    def send_part(self, meeting: TransferSession, first: int, descriptor: Descriptor) -> None:
        """Send completed blocks of a prompt to the waiting decode worker."""

    def finish_session(self, meeting: TransferSession, params: dict[str, Any]) -> None:
        """Finish the session: the prompt is computed."""

    def fail_session(self, meeting: TransferSession, reason: str) -> None:
        """End the session of a prompt that will not be computed; no effect if it has ended."""


class BlockPuller(Protocol):
    """Fetch blocks from prefill workers. Called on the engine's thread; does not block."""

    def begin(self, fetch: Fetch) -> None:
        """Start to fetch the missing blocks of the fetch's sequence; the result is reported to the engine."""

    def abandon(self, fetch: Fetch) -> None:
        """Cancel a fetch that is no longer needed; one that has started still reports its end."""


class First(msgspec.Struct, omit_defaults=True):
    """First output token, computed together with the prompt."""

    token: int
    logprob: float | None = None
    alternatives: list[tuple[int, float]] = msgspec.field(default_factory=list)

    @classmethod
    def of(cls, output: EngineOutput) -> "First | None":
        """Return the first token of an output; None if the output has none."""
        if not output.token_ids:
            return None
        top = output.top_logprobs[0] if output.top_logprobs else []
        return cls(
            output.token_ids[0],
            output.log_probs[0] if output.log_probs else None,
            [(one.token_id, one.logprob) for one in top],
        )


class Params(msgspec.Struct, omit_defaults=True):
    """`disaggregated_params` of this engine."""

    prompt_tokens: int
    kv: Descriptor | None = None
    first: First | None = None
    cached_tokens: int | None = None
    adapter: int | None = None
    """Fingerprint of the LoRA adapter that computed the prompt."""


def params_of(
    descriptor: Descriptor | None,
    output: EngineOutput,
    prompt_tokens: int,
    cached_tokens: int | None,
    adapter: int | None = None,
) -> dict[str, Any]:
    """Return the `disaggregated_params` of a prefill worker."""
    params = Params(prompt_tokens, descriptor, First.of(output), cached_tokens, adapter)
    value: dict[str, Any] = msgspec.to_builtins(params)
    return value


def read_params(
    value: Mapping[str, Any],
    prompt: Sequence[int],
    layout: Layout,
    vocab_size: int,
    *,
    asks_logprobs: bool,
    adapter: int | None = None,
    first_block: int = 0,
) -> tuple[Descriptor, Sampled | None, int | None]:
    """Decode the params of a prefill worker; earlier blocks were announced before. Raise `TransferError` if unusable."""
    try:
        params = msgspec.convert(value, Params)
    except msgspec.ValidationError as error:
        raise TransferError(f"cannot decode the prefill worker's disaggregated_params: {error}") from None
    if params.kv is None:
        raise TransferError("the prefill worker kept no blocks")
    if params.adapter != adapter:
        raise TransferError("the prefill worker computed the prompt with another LoRA adapter")
    descriptor = Descriptor.check(params.kv)
    layout.check(descriptor.layout)
    blocks = -(-len(prompt) // layout.block_tokens) - first_block
    if params.prompt_tokens != len(prompt) or len(descriptor.blocks) != blocks:
        raise TransferError(
            f"the prefill worker computed {params.prompt_tokens} tokens into {len(descriptor.blocks)} blocks; the "
            f"prompt has {len(prompt)}"
        )
    first = params.first
    if first is None or not 0 <= first.token < vocab_size or (asks_logprobs and first.logprob is None):
        return descriptor, None, params.cached_tokens
    logprob = first.logprob if asks_logprobs else None
    return descriptor, Sampled(first.token, logprob, first.alternatives), params.cached_tokens


def fetch_of(
    value: Mapping[str, Any],
    prompt: Sequence[int],
    layout: Layout,
    vocab_size: int,
    deadline: Deadline,
    *,
    asks_logprobs: bool,
    adapter: int | None = None,
) -> Fetch:
    """Return the fetch for a request. Raise `TransferError` if its params are unusable."""
    descriptor, first, cached_tokens = read_params(
        value, prompt, layout, vocab_size, asks_logprobs=asks_logprobs, adapter=adapter
    )
    return Fetch(descriptor, deadline, first, cached_tokens)


def meeting_of(info: BootstrapInfo) -> TransferSession:
    """Return the session in which the prefill and decode phases of a request connect."""
    key = info.handoff_id if isinstance(info.handoff_id, bytes) else b""
    return TransferSession(info.bootstrap_host, info.bootstrap_port, info.bootstrap_room, key)


def fetch_from(
    info: BootstrapInfo,
    prompt: Sequence[int],
    layout: Layout,
    vocab_size: int,
    *,
    asks_logprobs: bool,
    adapter: int | None = None,
) -> Fetch:
    """Return the fetch for a request whose prompt is being computed."""
    fetch = Fetch(None, Deadline.after(WHOLE_S), meeting=meeting_of(info))

    def understand(params: dict[str, Any], reached: int) -> None:
        fetch.descriptor, fetch.first, fetch.cached_tokens = read_params(
            params, prompt, layout, vocab_size, asks_logprobs=asks_logprobs, adapter=adapter, first_block=reached
        )

    fetch.understand = understand
    return fetch
