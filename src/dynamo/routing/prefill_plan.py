"""Prefill plan: the requests of the prefill and decode phases, and the choice of disaggregated routing. Pure.

    request ──▶ prefill phase ──▶ a prefill worker: one token, and the location of the blocks
            └─▶ decode phase  ──▶ a decode worker: that result or the bootstrap address, no credit for cached blocks

A request has one phase if the decode worker computes the prompt itself: because that is faster (`Conditional`), or
because no prefill worker is available.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from dynamo.core.codec import json_decode
from dynamo.core.errors import ConfigError
from dynamo.protocols.engine import (
    BYPASS_REMOTE_PREFILL,
    BootstrapInfo,
    PrefillResult,
    PreprocessedRequest,
    Routing,
)

FLAG, CONFIG_FLAG = "--router-conditional-disagg", "--router-conditional-disagg-config"

DECODE_OVERRIDE: Mapping[str, Any] = {
    "overlap_score_credit": 0.0,
    "prefill_load_scale": None,
    "router_temperature": None,
    "assume_kv_reuse": False,
    "track_prefill_tokens": False,
    "shared_cache_multiplier": None,
}
"""Weights for choosing a decode worker by load alone: its blocks come from the prefill worker. Nulls as upstream."""

GOES_ON = (None, "length")
"""Finish reasons of the prefill phase after which decode continues; any other one ends the request."""

LOCAL_PREFILL = "local_prefill"
"""Key in the `runtime_data` of a decode worker's card: the worker can compute a prompt itself."""


def prefill_routing_request(request: PreprocessedRequest) -> PreprocessedRequest:
    """Return the request for the prefill workers' router, with the named prefill worker as the target."""
    routing = request.routing
    if routing is None:
        return request
    named = msgspec.structs.replace(
        routing,
        backend_instance_id=routing.prefill_worker_id,
        decode_worker_id=None,
        dp_rank=routing.prefill_dp_rank,
    )
    return msgspec.structs.replace(request, routing=named)


def prefill_request(
    request: PreprocessedRequest, worker_id: int, dp_rank: int | None, meeting: BootstrapInfo | None
) -> PreprocessedRequest:
    """Return the request for the prefill worker. `dp_rank` is set if a router chose one."""
    routing = msgspec.structs.replace(request.routing or Routing(), prefill_worker_id=worker_id)
    if dp_rank is not None:
        routing.dp_rank = routing.prefill_dp_rank = dp_rank
    return msgspec.structs.replace(
        request,
        stop_conditions=msgspec.structs.replace(request.stop_conditions, max_tokens=1),
        routing=routing,
        bootstrap_info=meeting or UNSET,
    )


def decode_request(
    request: PreprocessedRequest,
    worker_id: int,
    dp_rank: int | None,
    found: PrefillResult | BootstrapInfo,
) -> PreprocessedRequest:
    """Return the request for the decode worker; its router sets the decode rank."""
    routing = msgspec.structs.replace(request.routing or Routing(), prefill_worker_id=worker_id)
    is_meeting = isinstance(found, BootstrapInfo)
    if is_meeting and dp_rank is not None:
        routing.prefill_dp_rank = dp_rank
    return msgspec.structs.replace(
        request,
        routing=routing,
        router_config_override=dict(DECODE_OVERRIDE),
        prefill_result=UNSET if isinstance(found, BootstrapInfo) else found,
        bootstrap_info=found if isinstance(found, BootstrapInfo) else UNSET,
    )


def whole(request: PreprocessedRequest) -> PreprocessedRequest:
    """Return the request for a decode worker that computes the prompt itself."""
    if BYPASS_REMOTE_PREFILL in request.annotations:
        return request
    return msgspec.structs.replace(request, annotations=[*request.annotations, BYPASS_REMOTE_PREFILL])


class PrefillFacts(Struct, frozen=True):
    """Input of the decision whether a request is disaggregated."""

    prompt_tokens: int
    new_tokens: int
    """Prompt tokens that are not cached on the candidate decode worker."""
    prefill_load: float | None = None
    """Active prompt tokens of the candidate prefill worker, in multiples of its largest batch; None if unknown."""
    decode_load: float | None = None
    """Fraction of the candidate decode worker's blocks in use with this request; None if unknown."""


class Conditional(Struct, frozen=True):
    """Conditions of `--router-conditional-disagg` under which a decode worker computes the prompt itself."""

    policy: str = "isl_bounding"
    eff_isl_threshold: int = 2048
    """Number of new tokens from which a prompt counts as long and goes to a prefill worker."""
    eff_isl_ratio_threshold: float = 0.7
    """Fraction of new tokens in the prompt from which it counts as long."""
    prefill_busy_threshold: float | None = None
    """Multiple of its largest batch above which a prefill worker is busy."""
    decode_busy_threshold: float | None = None
    """Fraction of blocks in use above which a decode worker does not compute prompts."""

    @classmethod
    def read(cls, text: str | None, queue_threshold: float | None) -> "Conditional":
        """Parse the flags. Raises `ConfigError` that names the field."""
        given = json_object(text) if text is not None else {}
        unknown = sorted(given.keys() - set(cls.__struct_fields__))
        if unknown:
            raise ConfigError(
                f"{CONFIG_FLAG}: {', '.join(unknown)}: expected one of {', '.join(cls.__struct_fields__)}"
            )
        try:
            made = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{CONFIG_FLAG}: {error}") from None
        made._check()
        if made.policy in LOAD_POLICIES and made.prefill_busy_threshold is None:
            if queue_threshold is None:
                raise ConfigError(
                    f"{CONFIG_FLAG}: policy {made.policy} requires prefill_busy_threshold, or --router-queue-threshold"
                )
            made = replace(made, prefill_busy_threshold=queue_threshold)
        return made

    def _check(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"{CONFIG_FLAG}: policy {self.policy!r}: expected one of {', '.join(POLICIES)}")
        for name, least, most in (
            ("eff_isl_threshold", 0, math.inf),
            ("eff_isl_ratio_threshold", 0, 1),
            ("prefill_busy_threshold", 0, math.inf),
            ("decode_busy_threshold", 0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{CONFIG_FLAG}: {name} {value:g}: expected {least:g} to {most:g}")

    def bypasses(self, facts: PrefillFacts) -> bool:
        """Whether the decode worker computes the prompt."""
        if self._is_over(facts.decode_load, self.decode_busy_threshold):
            return False
        is_short = (
            facts.new_tokens < self.eff_isl_threshold
            and facts.new_tokens < self.eff_isl_ratio_threshold * facts.prompt_tokens
        )
        is_busy = self._is_over(facts.prefill_load, self.prefill_busy_threshold)
        match self.policy:
            case "isl_bounding":
                return is_short
            case "prefill_load":
                return is_busy
            case _:
                return is_short or is_busy

    @staticmethod
    def _is_over(load: float | None, threshold: float | None) -> bool:
        return load is not None and threshold is not None and load > threshold


POLICIES = ("isl_bounding", "prefill_load", "isl_or_load")
LOAD_POLICIES = frozenset({"prefill_load", "isl_or_load"})


def json_object(text: str) -> dict[str, Any]:
    """Parse the JSON object in a flag's value. Raises `ConfigError`."""
    try:
        value = json_decode(text.encode())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{CONFIG_FLAG} {text}: expected a JSON object")
    return value
