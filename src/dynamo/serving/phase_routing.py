"""Choice of the workers of a request in two phases: whether it has two, and which decode workers can receive its blocks."""

import logging
import random
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dynamo.core.errors import DynamoException, NotReady
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.routing.prefill_plan import DECODE_OVERRIDE, PrefillFacts, prefill_routing_request
from dynamo.routing.topology import constraints_of, near_taint_of, taints_of, transfer_constraints
from dynamo.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

DOMAINS_MAX = 16
"""Transfer domains that are compared: each costs a decision about the decode worker."""
UNREACHABLE_S = 1e6
"""Cost of a domain without an eligible decode worker."""


def prefill_set_of(model: ServedModel) -> ServedModel | None:
    """Return a set of prefill workers: of several sets, a random one weighted by its workers."""
    sets = [(one, len(one.worker_ids())) for one in model.current.prefill_sets]
    able = [(one, count) for one, count in sets if count]
    if len(able) < 2:
        return able[0][0] if able else None
    return random.choices([one for one, _ in able], weights=[count for _, count in able])[0]


def computes_locally(
    model: ServedModel,
    request: PreprocessedRequest,
    request_id: str,
    *,
    avoid: Collection[int] = (),
    prefill_avoid: Collection[int] = (),
) -> bool:
    """Return whether the decode worker computes the prompt because that is expected to be faster.

    `avoid` are decode workers that must not be chosen, `prefill_avoid` prefill workers.
    """
    model = model.current
    rule, decode = model.conditional, model.kv
    prefill = prefill_set_of(model)
    if rule is None or decode is None or prefill is None or prefill.kv is None:
        return False
    try:
        there = decode.peek(request, request_id, avoid=avoid)
        elsewhere = prefill.kv.peek(prefill_routing_request(request), request_id, avoid=prefill_avoid)
    except DynamoException as error:
        logger.debug("request %s: cannot evaluate local prefill, using two phases: %s", request_id, error)
        return False
    size = decode.config.block_size
    tokens = len(request.token_ids)
    loads = prefill.kv.machine.loads()[elsewhere.worker_id, elsewhere.dp_rank]
    batch = prefill.kv.machine.workers[elsewhere.worker_id].batch_tokens
    capacity = decode.machine.workers[there.worker_id].kv_blocks
    used = decode.machine.loads()[there.worker_id, there.dp_rank][1] + there.blocks - there.overlap_blocks
    facts = PrefillFacts(
        tokens,
        max(0, tokens - size * there.overlap_blocks),
        prefill_load=loads[0] / batch if batch else None,
        decode_load=used / capacity if capacity else None,
    )
    return rule.bypasses(facts)


class Reach(Struct, frozen=True):
    """Decode workers that can receive the blocks of a prefill worker."""

    constraints: dict[str, Any] | None = None
    """Routing constraints of the decode worker; None if every worker can."""
    out_of_reach: frozenset[int] = frozenset()
    """Decode workers that cannot receive the blocks."""
    required: Sequence[str] = ()
    """Taints that a decode worker must have."""
    is_empty: bool = False
    """Whether no decode worker can receive them."""


def reach_of(model: ServedModel, request: PreprocessedRequest, prefill: ServedModel, worker_id: int) -> Reach:
    """Return the decode workers of a model that can receive the blocks of a prefill worker."""
    card = prefill.card_of(worker_id)
    required, preferred = (frozenset[str](), {}) if card is None else transfer_constraints(card.runtime_config)
    if not required and not preferred:
        return Reach()
    given = dict((request.routing.routing_constraints if request.routing is not None else None) or {})
    given["required_taints"] = sorted({*(given.get("required_taints") or ()), *required})
    given["preferred_taints"] = {**(given.get("preferred_taints") or {}), **preferred}
    model = model.current
    cards = {worker: model.card_of(worker) for worker in model.worker_ids()}
    out_of_reach = frozenset(
        worker for worker, its in cards.items() if its is None or not required <= taints_of(its.runtime_config)
    )
    return Reach(given, out_of_reach, sorted(required), is_empty=bool(cards) and out_of_reach == cards.keys())


def onward_costs(
    model: ServedModel, request: PreprocessedRequest, request_id: str, prefill: ServedModel
) -> dict[str, float]:
    """Return the seconds that a request costs its best decode worker, by the transfer domain of the prefill worker.

    Empty if the choice of the prefill worker does not affect that of the decode worker, because there are not several domains, or if
    the routers do not count in seconds.
    """
    decode = model.current.kv
    if decode is None or prefill.kv is None or {decode.config.policy, prefill.kv.config.policy} != {"balanced"}:
        return {}
    domains: dict[str, int] = {}
    for worker in prefill.worker_ids():
        card = prefill.card_of(worker)
        try:
            required, preferred = (frozenset[str](), {}) if card is None else transfer_constraints(card.runtime_config)
        except NotReady:
            continue  # Sending the request there reports it.
        for taint in (*required, *preferred):
            domains.setdefault(taint, worker)
    if not 1 < len(domains) <= DOMAINS_MAX:
        return {}
    after = msgspec.structs.replace(request, router_config_override=dict(DECODE_OVERRIDE))
    route_request = decode.to_route_request(after, request_id)  # The prompt is hashed once for all domains.
    decode.prepare(route_request)
    found = {}
    for taint, worker in domains.items():
        reach = reach_of(model, request, prefill, worker)
        required, preferred = constraints_of(reach.constraints)
        onward = msgspec.structs.replace(
            route_request,
            required_taints=required,
            preferred_taints=preferred,
            near_taint=near_taint_of(preferred),
            avoid=reach.out_of_reach,
        )
        try:
            found[taint] = decode.look(onward).cost
        except DynamoException as error:
            logger.debug("request %s: no decode worker for %s: %s", request_id, taint, error)
            found[taint] = UNREACHABLE_S
    return found
