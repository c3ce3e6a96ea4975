"""Requests in tokens, for tests."""

from typing import Any

from dynamo.openai_proxy.tokens import ProxyLimits, TokenResponseParser
from dynamo.protocols.engine import (
    EngineOutput,
    OutputOptions,
    PreprocessedRequest,
    Routing,
    SamplingOptions,
    StopConditions,
)

LIMITS = ProxyLimits(model="theirs", context_length=100, ranks=2)


def request(**given: Any) -> PreprocessedRequest:
    """One, of flat options."""
    kinds: dict[str, Any] = {
        "stop_conditions": StopConditions,
        "sampling_options": SamplingOptions,
        "output_options": OutputOptions,
        "routing": Routing,
    }
    parts: dict[str, Any] = {name: {} for name in kinds}
    own: dict[str, Any] = {}
    for name, value in given.items():
        home = next((part for part, kind in kinds.items() if name in kind.__struct_fields__), None)
        (own if home is None else parts[home])[name] = value
    made = {name: kinds[name](**values) for name, values in parts.items() if values}
    return PreprocessedRequest("ours", own.pop("token_ids", [1, 2, 3]), **made, **own)


def outputs_of(answer: TokenResponseParser, *chunks: Any) -> list[EngineOutput]:
    """Return all outputs of these chunks."""
    found = [piece for chunk in chunks for piece in answer.take(chunk)]
    return [*found, answer.end()]
