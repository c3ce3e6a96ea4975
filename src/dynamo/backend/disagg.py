"""Disaggregation: a worker's role, and the handover from the prefill to the decode worker. Pure.

A prefill worker computes the prompt and one token, and returns the location of the KV blocks in `disaggregated_params`;
a decode worker receives it in `prefill_result` and continues from there. The content is specific to the engines.

    request = prefill_request(request)                     # prefill: one token, one choice
    reply.item(prefill_output([token], params, usage))     # its output; `finish_reason` is for an end before decode
    result = prefill_result_of(request)                    # decode: None means that it computes the prompt itself
"""

import enum
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.protocols.engine import (
    BYPASS_REMOTE_PREFILL,
    BootstrapInfo,
    CompletionUsage,
    EngineOutput,
    PrefillResult,
    PreprocessedRequest,
)

DRAIN_TIMEOUT_S = 30.0
"""Default time that a stopping prefill worker waits for its blocks to be fetched."""


class DisaggregationMode(enum.Enum):
    """Role of a worker; the values of `--disaggregation-mode`."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"

    @property
    def worker_type(self) -> str:
        """The role's name on the model's card."""
        return "aggregated" if self is DisaggregationMode.AGGREGATED else self.value

    @property
    def component(self) -> str:
        """The default component: one for each role that routers must distinguish."""
        return "backend" if self in (DisaggregationMode.AGGREGATED, DisaggregationMode.DECODE) else self.value

    @property
    def needs(self) -> list[list[str]]:
        """The other worker roles that the model requires: the outer list is or, the inner one and."""
        match self:
            case DisaggregationMode.PREFILL:
                return [["decode"]]
            case DisaggregationMode.DECODE:
                return [["prefill"]]
            case _:
                return []

    @property
    def answers_clients(self) -> bool:
        """Whether the card names request types: a prefill worker's names none."""
        return self in (DisaggregationMode.AGGREGATED, DisaggregationMode.DECODE)

    @property
    def publishes_cache(self) -> bool:
        """Whether KV cache events are published: prompts are not routed to decode workers by cached blocks."""
        return self in (DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL)


def mode_of(
    value: str | None, *, is_prefill_worker: bool = False, is_decode_worker: bool = False
) -> DisaggregationMode:
    """Return the role set by the flag or its two aliases. Raise `ConfigError` if they contradict each other."""
    if not (is_prefill_worker or is_decode_worker):
        return DisaggregationMode(value or "agg")
    if value is not None:
        raise ConfigError(
            f"--disaggregation-mode {value} and --is-{'prefill' if is_prefill_worker else 'decode'}-worker: "
            "are mutually exclusive"
        )
    if is_prefill_worker and is_decode_worker:
        raise ConfigError("--is-prefill-worker and --is-decode-worker are mutually exclusive")
    return DisaggregationMode.PREFILL if is_prefill_worker else DisaggregationMode.DECODE


def prefill_request(request: PreprocessedRequest) -> PreprocessedRequest:
    """Return a request as a prefill worker computes it: one choice of exactly one token."""
    stop = msgspec.structs.replace(request.stop_conditions, max_tokens=1, min_tokens=1)
    sampling = request.sampling_options
    if (sampling.n or 1) > 1 or (sampling.best_of or 1) > 1:
        sampling = msgspec.structs.replace(sampling, n=1, best_of=None)
    return msgspec.structs.replace(request, stop_conditions=stop, sampling_options=sampling)


def prefill_output(
    token_ids: list[int],
    disaggregated_params: Mapping[str, Any],
    usage: CompletionUsage | None = None,
    *,
    finish_reason: str | None = "length",
    engine_data: Mapping[str, Any] | None = None,
) -> EngineOutput:
    """Return a prefill worker's output. `finish_reason` None and "length" continue on a decode worker, "stop" ends."""
    return EngineOutput(
        token_ids,
        0,
        finish_reason=finish_reason,
        completion_usage=usage,
        disaggregated_params=dict(disaggregated_params),
        engine_data=None if engine_data is None else dict(engine_data),
    )


def must_prefill_here(request: PreprocessedRequest) -> bool:
    """Return whether a decode worker must compute the prompt itself."""
    return BYPASS_REMOTE_PREFILL in request.annotations


def prefill_result_of(request: PreprocessedRequest) -> PrefillResult | None:
    """Return the prefill result for a decode worker; None if it must compute the prompt itself.

    Raise `InvalidArgument` for a request that did not pass a prefill router.
    """
    result = request.prefill_result
    if isinstance(result, PrefillResult):
        return result
    if must_prefill_here(request):
        return None
    raise InvalidArgument(
        "a decode worker received a request without prefill_result: start prefill workers of the same model behind the "
        "frontend, or let the decode worker compute the prompt with the annotation "
        f"{BYPASS_REMOTE_PREFILL!r}",
        param="prefill_result",
    )


def bootstrap_of(request: PreprocessedRequest) -> BootstrapInfo | None:
    """Return the rendezvous of concurrently sent prefill and decode requests, if any."""
    return request.bootstrap_info if isinstance(request.bootstrap_info, BootstrapInfo) else None


def prefill_source_of(request: PreprocessedRequest) -> PrefillResult | BootstrapInfo | None:
    """Return the input of a decode worker that supports both forms: a finished prefill, a running one, or None.

    Raise `InvalidArgument` for a request that did not pass a prefill router.
    """
    return bootstrap_of(request) or prefill_result_of(request)


def without_prefill(request: PreprocessedRequest) -> PreprocessedRequest:
    """Return the request without its prefill result, to be computed as a whole after the prefill was lost."""
    return msgspec.structs.replace(
        request,
        annotations=[*request.annotations, *(() if must_prefill_here(request) else (BYPASS_REMOTE_PREFILL,))],
        prefill_result=UNSET,
        bootstrap_info=UNSET,
    )


def drain_timeout_s() -> float:
    """Return `DYN_PREFILL_DRAIN_TIMEOUT_S` in seconds; the default if it is invalid."""
    try:
        seconds = setting("DYN_PREFILL_DRAIN_TIMEOUT_S", DRAIN_TIMEOUT_S, float)
    except ConfigError:
        return DRAIN_TIMEOUT_S
    return max(0.0, seconds) if math.isfinite(seconds) else DRAIN_TIMEOUT_S
