"""What the two legs of a request are sent, and when it has only one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.kv_router.config import CostWeights
from dynamo.protocols.engine import (
    BYPASS_REMOTE_PREFILL,
    BootstrapInfo,
    PrefillResult,
    PreprocessedRequest,
    Routing,
    StopConditions,
)
from dynamo.routing.prefill_plan import (
    DECODE_OVERRIDE,
    Conditional,
    PrefillFacts,
    decode_request,
    prefill_request,
    prefill_routing_request,
    whole,
)

MEETING = BootstrapInfo("host", 7, 2**62, b"0123456789abcdef")


def a_request(routing: Routing | None = None) -> PreprocessedRequest:
    return PreprocessedRequest("m", [1, 2, 3], StopConditions(max_tokens=20, min_tokens=3), routing=routing)


def test_a_prefill_worker_is_asked_for_one_token_and_told_who_it_is() -> None:
    request = a_request(Routing(priority=2))
    leg = prefill_request(request, 5, None, None)
    assert (leg.stop_conditions.max_tokens, leg.stop_conditions.min_tokens) == (1, 3)
    assert leg.routing == Routing(priority=2, prefill_worker_id=5)
    assert leg.router_config_override is None
    assert (request.stop_conditions.max_tokens, request.routing) == (20, Routing(priority=2))


def test_a_rank_that_a_router_chose_is_said_twice() -> None:
    leg = prefill_request(a_request(), 5, 1, None)
    assert leg.routing == Routing(prefill_worker_id=5, dp_rank=1, prefill_dp_rank=1)


def test_a_decode_worker_gets_the_result_and_is_chosen_by_its_load() -> None:
    leg = decode_request(a_request(), 5, 1, PrefillResult({"at": 1}))
    assert leg.stop_conditions.max_tokens == 20
    assert leg.routing == Routing(prefill_worker_id=5)
    assert leg.prefill_result == PrefillResult({"at": 1})
    assert not leg.bootstrap_info
    weights = CostWeights(router_temperature=0.5).overridden(leg.router_config_override)
    assert (weights.overlap_score_credit, weights.assume_kv_reuse, weights.track_prefill_tokens) == (0.0, False, False)
    assert weights.router_temperature == 0.5, "a null changes nothing"


def test_both_legs_meet_at_the_same_place() -> None:
    request = a_request()
    prefill, decode = prefill_request(request, 5, 1, MEETING), decode_request(request, 5, 1, MEETING)
    assert prefill.bootstrap_info == decode.bootstrap_info == MEETING
    assert not decode.prefill_result
    assert decode.routing == Routing(prefill_worker_id=5, prefill_dp_rank=1)


def test_one_request_s_override_is_not_another_s() -> None:
    leg = decode_request(a_request(), 5, None, MEETING)
    assert leg.router_config_override is not None
    leg.router_config_override["router_temperature"] = 3.0
    assert DECODE_OVERRIDE["router_temperature"] is None


def test_the_prefill_workers_router_is_asked_for_the_prefill_worker_that_is_named() -> None:
    request = a_request(Routing(backend_instance_id=1, decode_worker_id=2, prefill_worker_id=3, prefill_dp_rank=4))
    assert prefill_routing_request(request).routing == Routing(
        backend_instance_id=3, dp_rank=4, prefill_worker_id=3, prefill_dp_rank=4
    )
    assert prefill_routing_request(a_request()).routing is None


def test_who_computes_the_prompt_itself_is_told_once() -> None:
    told = whole(a_request())
    assert told.annotations == [BYPASS_REMOTE_PREFILL]
    assert whole(told) is told


# Conditional disaggregation.


def test_a_short_remainder_of_a_known_prompt_stays_with_the_decode_worker() -> None:
    rule = Conditional.read(None, None)
    assert (rule.policy, rule.eff_isl_threshold, rule.eff_isl_ratio_threshold) == ("isl_bounding", 2048, 0.7)
    assert rule.bypasses(PrefillFacts(10_000, 2047))
    assert not rule.bypasses(PrefillFacts(10_000, 2048))
    assert not rule.bypasses(PrefillFacts(100, 70))
    assert rule.bypasses(PrefillFacts(100, 69))


def test_a_busy_prefill_worker_is_spared() -> None:
    rule = Conditional.read('{"policy": "prefill_load", "prefill_busy_threshold": 0.5}', None)
    assert rule.bypasses(PrefillFacts(10_000, 10_000, prefill_load=0.6))
    assert not rule.bypasses(PrefillFacts(10_000, 0, prefill_load=0.5))
    assert not rule.bypasses(PrefillFacts(10_000, 0)), "what is not known is not busy"


def test_either_reason_is_enough_for_the_policy_that_has_both() -> None:
    rule = Conditional.read('{"policy": "isl_or_load"}', 0.5)
    assert rule.prefill_busy_threshold == 0.5, "the queue's threshold stands in"
    assert rule.bypasses(PrefillFacts(10_000, 10, prefill_load=0.0))
    assert rule.bypasses(PrefillFacts(10_000, 10_000, prefill_load=0.6))
    assert not rule.bypasses(PrefillFacts(10_000, 10_000, prefill_load=0.5))


@given(st.integers(0, 5000), st.floats(0, 3), st.floats(0, 1), st.sampled_from(["isl_bounding", "isl_or_load"]))
def test_a_busy_decode_worker_never_gets_a_prompt(new: int, prefill: float, decode: float, policy: str) -> None:
    text = msgspec.json.encode({"policy": policy, "decode_busy_threshold": 0.5}).decode()
    rule = Conditional.read(text, 1.0)
    assert not (decode > 0.5 and rule.bypasses(PrefillFacts(5000, new, prefill, decode)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "JSON object"),
        ("{", "JSON object"),
        ('{"polcy": "isl_bounding"}', "polcy"),
        ('{"policy": "always"}', "always"),
        ('{"policy": 3}', "policy"),
        ('{"eff_isl_threshold": -1}', "eff_isl_threshold"),
        ('{"eff_isl_threshold": 1.5}', "eff_isl_threshold"),
        ('{"eff_isl_ratio_threshold": 1.1}', "eff_isl_ratio_threshold"),
        ('{"decode_busy_threshold": -0.1}', "decode_busy_threshold"),
        ('{"policy": "prefill_load"}', "prefill_busy_threshold"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Conditional.read(text, None)
