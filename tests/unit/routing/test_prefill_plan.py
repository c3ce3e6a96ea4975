"""The requests of the prefill and decode phases, and when there is only one."""

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


def test_prefill_plan_requests_one_token_with_the_worker_id() -> None:
    request = a_request(Routing(priority=2))
    phase = prefill_request(request, 5, None, None)
    assert (phase.stop_conditions.max_tokens, phase.stop_conditions.min_tokens) == (1, 3)
    assert phase.routing == Routing(priority=2, prefill_worker_id=5)
    assert phase.router_config_override is None
    assert (request.stop_conditions.max_tokens, request.routing) == (20, Routing(priority=2))


def test_prefill_plan_sends_a_chosen_rank_in_both_fields() -> None:
    phase = prefill_request(a_request(), 5, 1, None)
    assert phase.routing == Routing(prefill_worker_id=5, dp_rank=1, prefill_dp_rank=1)


def test_prefill_plan_routes_decode_by_load_with_the_prefill_result() -> None:
    phase = decode_request(a_request(), 5, 1, PrefillResult({"at": 1}))
    assert phase.stop_conditions.max_tokens == 20
    assert phase.routing == Routing(prefill_worker_id=5)
    assert phase.prefill_result == PrefillResult({"at": 1})
    assert not phase.bootstrap_info
    weights = CostWeights(router_temperature=0.5).overridden(phase.router_config_override)
    assert (weights.overlap_score_credit, weights.assume_kv_reuse, weights.track_prefill_tokens) == (0.0, False, False)
    assert weights.router_temperature == 0.5, "a null changes nothing"


def test_prefill_plan_gives_both_phases_the_same_bootstrap() -> None:
    request = a_request()
    prefill, decode = prefill_request(request, 5, 1, MEETING), decode_request(request, 5, 1, MEETING)
    assert prefill.bootstrap_info == decode.bootstrap_info == MEETING
    assert not decode.prefill_result
    assert decode.routing == Routing(prefill_worker_id=5, prefill_dp_rank=1)


def test_prefill_plan_overrides_are_per_request() -> None:
    phase = decode_request(a_request(), 5, None, MEETING)
    assert phase.router_config_override is not None
    phase.router_config_override["router_temperature"] = 3.0
    assert DECODE_OVERRIDE["router_temperature"] is None


def test_prefill_plan_passes_a_named_prefill_worker_to_its_router() -> None:
    request = a_request(Routing(backend_instance_id=1, decode_worker_id=2, prefill_worker_id=3, prefill_dp_rank=4))
    assert prefill_routing_request(request).routing == Routing(
        backend_instance_id=3, dp_rank=4, prefill_worker_id=3, prefill_dp_rank=4
    )
    assert prefill_routing_request(a_request()).routing is None


def test_prefill_plan_reports_local_prefill_once() -> None:
    reported = whole(a_request())
    assert reported.annotations == [BYPASS_REMOTE_PREFILL]
    assert whole(reported) is reported


# Conditional disaggregation.


def test_prefill_plan_keeps_a_short_remainder_on_the_decode_worker() -> None:
    rule = Conditional.read(None, None)
    assert (rule.policy, rule.eff_isl_threshold, rule.eff_isl_ratio_threshold) == ("isl_bounding", 2048, 0.7)
    assert rule.bypasses(PrefillFacts(10_000, 2047))
    assert not rule.bypasses(PrefillFacts(10_000, 2048))
    assert not rule.bypasses(PrefillFacts(100, 70))
    assert rule.bypasses(PrefillFacts(100, 69))


def test_prefill_plan_skips_a_busy_prefill_worker() -> None:
    rule = Conditional.read('{"policy": "prefill_load", "prefill_busy_threshold": 0.5}', None)
    assert rule.bypasses(PrefillFacts(10_000, 10_000, prefill_load=0.6))
    assert not rule.bypasses(PrefillFacts(10_000, 0, prefill_load=0.5))
    assert not rule.bypasses(PrefillFacts(10_000, 0)), "what is not known is not busy"


def test_prefill_plan_combined_policy_accepts_either_reason() -> None:
    rule = Conditional.read('{"policy": "isl_or_load"}', 0.5)
    assert rule.prefill_busy_threshold == 0.5, "the queue's threshold stands in"
    assert rule.bypasses(PrefillFacts(10_000, 10, prefill_load=0.0))
    assert rule.bypasses(PrefillFacts(10_000, 10_000, prefill_load=0.6))
    assert not rule.bypasses(PrefillFacts(10_000, 10_000, prefill_load=0.5))


@given(st.integers(0, 5000), st.floats(0, 3), st.floats(0, 1), st.sampled_from(["isl_bounding", "isl_or_load"]))
def test_prefill_plan_never_prefills_on_a_busy_decode_worker(
    new: int, prefill: float, decode: float, policy: str
) -> None:
    text = msgspec.json.encode({"policy": policy, "decode_busy_threshold": 0.5}).decode()
    rule = Conditional.read(text, 1.0)
    assert not (decode > 0.5 and rule.bypasses(PrefillFacts(5000, new, prefill, decode)))


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_prefill_plan_refuses_an_unknown_rule_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Conditional.read(text, None)
