"""Steps: computed and queued requests of a step of vLLM's scheduler, counted from its state. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from dynamo.core.tally import Tally
from dynamo.protocols.load import QueuedRequests, ScheduledRequests

QUEUE_MAX = 1024  # Maximum number of queued requests counted per step; more would slow the step down.


def scheduled_requests(tokens: Mapping[str, int], requests: Mapping[str, Any]) -> ScheduledRequests:
    """Count the scheduled `tokens` per request; vLLM's `requests` already include them as computed tokens."""
    prompts, reads = Tally(), Tally()
    counts = ScheduledRequests()
    for request_id, number in tokens.items():
        request = requests.get(request_id)
        if request is None:
            continue
        before = request.num_computed_tokens - number
        if before < request.num_prompt_tokens:
            prompts.add(request.num_prompt_tokens)
            counts.sum_prefill_tokens += number
            counts.sum_prefill_kv_tokens += before
        else:
            reads.add(before + number)
    counts.num_prefill_requests, counts.var_prefill_length = prompts.count, prompts.variance
    counts.num_decode_requests, counts.sum_decode_kv_tokens = reads.count, reads.total
    counts.var_decode_kv_tokens = reads.variance
    return counts


def queued_requests(waiting: Iterable[Any]) -> QueuedRequests:
    """Count waiting prompts and preempted requests."""
    prompts, reads = Tally(), Tally()
    for request, _ in zip(waiting, range(QUEUE_MAX), strict=False):
        if request.num_preemptions:
            reads.add(request.num_tokens)
        else:
            prompts.add(request.num_prompt_tokens)
    return QueuedRequests(
        prompts.count, prompts.total, prompts.variance, reads.count, reads.total, reads.variance
    )  # fmt: skip
