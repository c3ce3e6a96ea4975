"""Arbitration: pairing, partial admission, intents with a lifetime, and the order of changes."""

import random

from dynamo.global_planner.arbitration import (
    GpuArbiter,
    PartnerChange,
    ReplicaPool,
    ReplicaPools,
    TotalGpuBand,
    apply_order,
    total_gpus,
)
from dynamo.protocols.scaling import TargetReplica

POOLS: ReplicaPools = {"k/a": {"decode": ReplicaPool(4, 1)}, "k/b": {"decode": ReplicaPool(4, 1)}}


def decode(number: int) -> list[TargetReplica]:
    return [TargetReplica(sub_component_type="decode", desired_replicas=number)]


def test_every_request_is_approved_without_a_gpu_limit() -> None:
    result = GpuArbiter(TotalGpuBand(), 60).decide("k/a", decode(1000), POOLS, 0)
    assert (result.partners, result.rejection) == ((), None)


def test_request_above_the_ceiling_is_rejected_with_its_reason() -> None:
    result = GpuArbiter(TotalGpuBand(max_gpus=8), 60).decide("k/a", decode(6), POOLS, 0)
    assert result.rejection == "GPU budget breach: total 10 exceeds ceiling (8); no feasible pair packing"


def test_rejected_intent_is_paired_with_a_later_opposite_request() -> None:
    arbiter = GpuArbiter(TotalGpuBand(8, 8), 60)
    assert arbiter.decide("k/a", decode(6), POOLS, 0).rejection is not None
    result = arbiter.decide("k/b", decode(2), POOLS, 30)
    assert [(one.key, one.desired) for one in result.partners] == [(("k/a", "decode"), 6)]


def test_expired_intent_is_not_paired_and_is_dropped() -> None:
    arbiter = GpuArbiter(TotalGpuBand(8, 8), 60)
    arbiter.decide("k/a", decode(6), POOLS, 0)
    assert arbiter.decide("k/b", decode(2), POOLS, 61).rejection is not None
    assert arbiter.pending == 1


def test_oversized_partner_is_admitted_in_part_up_to_the_ceiling() -> None:
    arbiter = GpuArbiter(TotalGpuBand(8, 8), 60)
    arbiter.decide("k/a", decode(9), POOLS, 0)
    assert [one.desired for one in arbiter.decide("k/b", decode(2), POOLS, 1).partners] == [6]


def test_changes_that_free_gpus_are_applied_first() -> None:
    partner = PartnerChange(("k/b", "decode"), POOLS["k/b"]["decode"], 2)
    order = apply_order("k/a", decode(6), [partner], POOLS)
    assert [name for name, _ in order] == ["k/b", "k/a"]


def test_approved_requests_never_exceed_the_ceiling() -> None:
    rng = random.Random(5)
    state = {name: {"decode": 4} for name in ("k/a", "k/b", "k/c")}
    arbiter = GpuArbiter(TotalGpuBand(8, 16), 60)
    for at in range(2000):
        pools: ReplicaPools = {name: {"decode": ReplicaPool(roles["decode"], 1)} for name, roles in state.items()}
        name = rng.choice(list(state))
        targets = decode(rng.randint(0, 12))
        result = arbiter.decide(name, targets, pools, at)
        if result.rejection is not None:
            continue
        for key, many in apply_order(name, targets, result.partners, pools):
            state[key]["decode"] = many[0].desired_replicas
        after: ReplicaPools = {key: {"decode": ReplicaPool(roles["decode"], 1)} for key, roles in state.items()}
        assert 7 <= total_gpus(after) <= 16
    assert arbiter.pending <= 3
