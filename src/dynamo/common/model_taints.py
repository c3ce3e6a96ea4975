"""The route that replaces the taints of a worker's model."""

from typing import Any

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.llm import update_model_taints
from dynamo.runtime import DistributedRuntime, Endpoint

MODEL_TAINT_ROUTE = "update/model_taints"
TOPOLOGY_TAINT_PREFIX = "dynamo.topology/"
"""Prefix of taints that the worker's topology owns."""


class TaintRequest(msgspec.Struct):
    """Body of a request that replaces the taints."""

    taints: list[str]


def _requested(body: object) -> set[str]:
    """Return the taints of a body. Raise `InvalidArgument`, which the route answers with status 400."""
    try:
        taints = set(msgspec.convert(body, TaintRequest).taints)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"'taints' must be a JSON array of strings: {error}") from None
    for taint in sorted(taints):
        if taint.startswith(TOPOLOGY_TAINT_PREFIX):
            raise InvalidArgument(f"taint {taint} uses reserved prefix {TOPOLOGY_TAINT_PREFIX!r}")
    return taints


def register_model_taint_route(runtime: DistributedRuntime, endpoint: Endpoint) -> None:
    """Serve `POST /engine/update/model_taints` with a body `{"taints": [...]}`."""

    async def replace_taints(body: dict[str, Any]) -> dict[str, Any]:
        taints = _requested(body)
        await update_model_taints(endpoint, taints)
        return {"status": "ok", "taints": sorted(taints)}

    runtime.register_engine_route(MODEL_TAINT_ROUTE, replace_taints)
