"""Prefill plan: what the two legs of a request are sent, and whether it has two (serving-plane.md §4.11). Pure.

    request ──▶ prefill leg ──▶ a prefill worker: one token, and where the blocks lie
            └─▶ decode leg  ──▶ a decode worker: that result, or where both meet, and no credit for what it holds

A request has one leg where the decode worker is told to compute the prompt itself: because that is sooner
(`Conditional`), or because nobody else is left who would.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET

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
"""How a decode worker is chosen: by its load alone, for the blocks come from elsewhere. Nulls as upstream writes them."""

GOES_ON = (None, "length")
"""How a prefill worker ends what decode goes on with; every other end is the request's."""

LOCAL_PREFILL = "local_prefill"
"""What a decode worker's card says in its `runtime_data` where it can compute a prompt itself."""


def prefill_ask(request: PreprocessedRequest) -> PreprocessedRequest:
    """The request as the prefill workers' router is asked about it: the worker that it names is the prefill worker."""
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


def prefill_leg(
    request: PreprocessedRequest, worker_id: int, dp_rank: int | None, meeting: BootstrapInfo | None
) -> PreprocessedRequest:
    """What the prefill worker is sent. `dp_rank` is there where a router chose one."""
    routing = msgspec.structs.replace(request.routing or Routing(), prefill_worker_id=worker_id)
    if dp_rank is not None:
        routing.dp_rank = routing.prefill_dp_rank = dp_rank
    return msgspec.structs.replace(
        request,
        stop_conditions=msgspec.structs.replace(request.stop_conditions, max_tokens=1),
        routing=routing,
        bootstrap_info=meeting or UNSET,
    )


def decode_leg(
    request: PreprocessedRequest,
    worker_id: int,
    dp_rank: int | None,
    found: PrefillResult | BootstrapInfo,
) -> PreprocessedRequest:
    """What the decode worker is sent after that; its own rank is for its router to say."""
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
    """What a decode worker is sent that computes the prompt itself."""
    if BYPASS_REMOTE_PREFILL in request.annotations:
        return request
    return msgspec.structs.replace(request, annotations=[*request.annotations, BYPASS_REMOTE_PREFILL])


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known when it is decided whether a request has two legs."""

    prompt_tokens: int
    new_tokens: int
    """Of them, what the decode worker that would be chosen does not hold."""
    prefill_load: float | None = None
    """Prompt tokens under way at the prefill worker that would be chosen, in its largest batches; None: unknown."""
    decode_load: float | None = None
    """The part of its blocks that the decode worker would have in use with this request; None: unknown."""


@dataclass(frozen=True, slots=True)
class Conditional:
    """`--router-conditional-disagg`: when a decode worker computes the prompt itself because that is sooner."""

    policy: str = "isl_bounding"
    eff_isl_threshold: int = 2048
    """Beyond so many new tokens a prompt is always computed elsewhere."""
    eff_isl_ratio_threshold: float = 0.7
    """And where so large a part of it is new."""
    prefill_busy_threshold: float | None = None
    """A prefill worker with more than so many of its largest batches under way is busy."""
    decode_busy_threshold: float | None = None
    """A decode worker with more than that part of its blocks in use is spared."""

    @classmethod
    def read(cls, text: str | None, queue_threshold: float | None) -> "Conditional":
        """What the flags say. Raises `ConfigError` that names the field."""
        given = json_object(text) if text is not None else {}
        unknown = sorted(given.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise ConfigError(
                f"{CONFIG_FLAG}: {', '.join(unknown)}: expected one of {', '.join(cls.__dataclass_fields__)}"
            )
        try:
            made = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{CONFIG_FLAG}: {error}") from None
        made._check()
        if made.policy in LOAD_POLICIES and made.prefill_busy_threshold is None:
            if queue_threshold is None:
                raise ConfigError(
                    f"{CONFIG_FLAG}: policy {made.policy} needs prefill_busy_threshold, or --router-queue-threshold"
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

    def bypasses(self, facts: Facts) -> bool:
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
    """The object in a flag's value. Raises `ConfigError`."""
    try:
        value = json_decode(text.encode())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{CONFIG_FLAG} {text}: expected a JSON object")
    return value
