"""Disaggregation: which part of a request a worker does, and what prefill hands to decode (serving-plane.md §5.7). Pure.

A prefill worker computes the prompt and one token, and says in `disaggregated_params` where the blocks lie; a decode
worker is given those words in `prefill_result` and goes on from there. What stands in them is the engines' own business.

    request = prefill_request(request)                     # prefill: one token, one choice
    reply.item(prefill_output([token], params, usage))     # …its answer; `finish_reason` is for an end before decode
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
"""How long a stopping prefill worker waits for its blocks to be fetched, unless it is told."""


class DisaggregationMode(enum.Enum):
    """What a worker does of each request; `--disaggregation-mode` takes the values."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"

    @property
    def worker_type(self) -> str:
        """As the model's card says it."""
        return "aggregated" if self is DisaggregationMode.AGGREGATED else self.value

    @property
    def component(self) -> str:
        """The component that it serves in unless it is told: one for each kind that must not be taken for another."""
        return "backend" if self in (DisaggregationMode.AGGREGATED, DisaggregationMode.DECODE) else self.value

    @property
    def needs(self) -> list[list[str]]:
        """Who else must be there before the model can be served: the outer list is or, the inner one and."""
        match self:
            case DisaggregationMode.PREFILL:
                return [["decode"]]
            case DisaggregationMode.DECODE:
                return [["prefill"]]
            case _:
                return []

    @property
    def answers_clients(self) -> bool:
        """Whether its card names what the model may be asked for: a prefill worker's names nothing."""
        return self in (DisaggregationMode.AGGREGATED, DisaggregationMode.DECODE)

    @property
    def tells_cache(self) -> bool:
        """Whether routers hear what its cache holds: prompts are never sent to a decode worker for what it holds."""
        return self in (DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL)


def mode_of(
    value: str | None, *, is_prefill_worker: bool = False, is_decode_worker: bool = False
) -> DisaggregationMode:
    """What the flag says, or the older two. Raises `ConfigError` where they contradict each other."""
    if not (is_prefill_worker or is_decode_worker):
        return DisaggregationMode(value or "agg")
    if value is not None:
        raise ConfigError(
            f"--disaggregation-mode {value} and --is-{'prefill' if is_prefill_worker else 'decode'}-worker: "
            "expected one of them"
        )
    if is_prefill_worker and is_decode_worker:
        raise ConfigError("--is-prefill-worker and --is-decode-worker: expected one of them")
    return DisaggregationMode.PREFILL if is_prefill_worker else DisaggregationMode.DECODE


def prefill_request(request: PreprocessedRequest) -> PreprocessedRequest:
    """A request as a prefill worker computes it: one choice of exactly one token, whatever its client asked for."""
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
    """The answer of a prefill worker. `finish_reason` None and "length" go on to decode, "stop" is the whole answer."""
    return EngineOutput(
        token_ids,
        0,
        finish_reason=finish_reason,
        completion_usage=usage,
        disaggregated_params=dict(disaggregated_params),
        engine_data=None if engine_data is None else dict(engine_data),
    )


def must_prefill_here(request: PreprocessedRequest) -> bool:
    """Whether a decode worker is told to compute the prompt itself."""
    return BYPASS_REMOTE_PREFILL in request.annotations


def prefill_result_of(request: PreprocessedRequest) -> PrefillResult | None:
    """What a decode worker goes on from; None where it is told to compute the prompt itself.

    Raises `InvalidArgument` for a request that no prefill router has seen.
    """
    result = request.prefill_result
    if isinstance(result, PrefillResult):
        return result
    if must_prefill_here(request):
        return None
    raise InvalidArgument(
        "a decode worker was sent a request without prefill_result: it is served behind a frontend that has "
        "prefill workers of the same model, or told to compute the prompt itself by the annotation "
        f"{BYPASS_REMOTE_PREFILL!r}",
        param="prefill_result",
    )


def bootstrap_of(request: PreprocessedRequest) -> BootstrapInfo | None:
    """Where both legs of a request meet, where they were sent at once."""
    return request.bootstrap_info if isinstance(request.bootstrap_info, BootstrapInfo) else None


def leg_of(request: PreprocessedRequest) -> PrefillResult | BootstrapInfo | None:
    """What a decode worker that can do both goes on from: a finished prefill, one that runs now, or None: nothing.

    Raises `InvalidArgument` for a request that no prefill router has seen.
    """
    return bootstrap_of(request) or prefill_result_of(request)


def without_prefill(request: PreprocessedRequest) -> PreprocessedRequest:
    """The same request to be computed whole by whoever gets it: its prefill was lost."""
    return msgspec.structs.replace(
        request,
        annotations=[*request.annotations, *(() if must_prefill_here(request) else (BYPASS_REMOTE_PREFILL,))],
        prefill_result=UNSET,
        bootstrap_info=UNSET,
    )


def drain_timeout_s() -> float:
    """`DYN_PREFILL_DRAIN_TIMEOUT_S`: what cannot be read, or is not a number of seconds, is the default."""
    try:
        seconds = setting("DYN_PREFILL_DRAIN_TIMEOUT_S", DRAIN_TIMEOUT_S, float)
    except ConfigError:
        return DRAIN_TIMEOUT_S
    return max(0.0, seconds) if math.isfinite(seconds) else DRAIN_TIMEOUT_S
