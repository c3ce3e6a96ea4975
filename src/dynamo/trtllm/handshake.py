"""Handshake: parameters of TensorRT-LLM's context engines for its generation engines, in wire format. Pure.

prefill: DisaggregatedParams(request_type="context_only", disagg_request_id=ids.next(now))
…TensorRT-LLM returns its own parameters…   to_wire(them)  ─▶ disaggregated_params
decode:  DisaggregatedParams(**from_wire(disaggregated_params), request_type="generation_only")
"""

import dataclasses
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Callable, Mapping
from typing import Any

from dynamo.core.errors import InvalidArgument

MACHINES = 1021  # The largest prime of ten bits: consecutive worker ids map to different values.
COUNTERS = 1 << 14
TIMES = 1 << 39
LEFT_OUT = ("first_gen_logits",)
"""Tensors that only the local engine uses."""


class RequestIds:
    """Generator of request ids that two engines share: milliseconds, worker, and a counter. Below 2**63."""

    def __init__(self, connection_id: int) -> None:
        self._machine = connection_id % MACHINES
        self._count = 0

    def next(self, now_s: float) -> int:
        """Return an id that no other worker generates."""
        self._count = (self._count + 1) % COUNTERS
        milliseconds = int(now_s * 1000) % TIMES
        return (milliseconds << 24) | (self._machine << 14) | self._count


def to_wire(params: Any) -> dict[str, Any]:
    """Return a `DisaggregatedParams` as a mapping of plain values, without unset fields."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value is None or field.name in LEFT_OUT:
            continue
        if field.name == "opaque_state":
            value = b64encode(value).decode()
        elif field.name == "first_gen_log_probs":
            value = [[[_row(step) for step in beam] for beam in token] for token in _as_beams(value)]
        elif isinstance(value, int) and not isinstance(value, bool):
            value = int(value)  # The number of an enum member.
        found[field.name] = value
    return found


def from_wire(params: Any, logprob: Callable[..., Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the arguments of `DisaggregatedParams` without `request_type`; `known` are its fields.

    Raise `InvalidArgument` for a result not from a TensorRT-LLM prefill worker.
    """
    if not isinstance(params, Mapping) or "first_gen_tokens" not in params:
        raise InvalidArgument(
            f"prefill_result: {str(params)[:80]!r}: expected TensorRT-LLM's disaggregated parameters",
            param="prefill_result",
        )
    given = {name: value for name, value in params.items() if name in known and name != "request_type"}
    try:
        if given.get("opaque_state") is not None:
            given["opaque_state"] = b64decode(given["opaque_state"], validate=True)
        if given.get("first_gen_log_probs") is not None:
            given["first_gen_log_probs"] = [
                [[_step(row, logprob) for row in beam] for beam in token] for token in given["first_gen_log_probs"]
            ]
    except (TypeError, ValueError, NotBase64) as error:
        raise InvalidArgument(f"prefill_result: {error}", param="prefill_result") from None
    return given


def _as_beams(value: list[Any]) -> list[Any]:
    """Return log-probabilities by token, beam and step; some engines omit a level."""
    return [token if token and isinstance(token[0], list) else [token] for token in value]


def _row(step: Any) -> list[Any]:
    """Return the alternatives of a token as `[id, log-probability, rank]` each; a bare log-probability is kept."""
    if isinstance(step, Mapping):
        return [[token, one.logprob, one.rank] for token, one in step.items()]
    return [float(step)]


def _step(row: list[Any], logprob: Callable[..., Any]) -> Any:
    if len(row) == 1 and isinstance(row[0], float):
        return row[0]
    return {int(token): logprob(logprob=likelihood, rank=rank) for token, likelihood, rank in row}
