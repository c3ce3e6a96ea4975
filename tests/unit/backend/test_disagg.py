import msgspec
import pytest

from dynamo.backend.disagg import (
    DRAIN_TIMEOUT_S,
    DisaggregationMode,
    bootstrap_of,
    drain_timeout_s,
    mode_of,
    must_prefill_here,
    prefill_output,
    prefill_request,
    prefill_result_of,
    prefill_source_of,
    without_prefill,
)
from dynamo.core.codec import decode, msgpack_encode
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.protocols.engine import (
    BYPASS_REMOTE_PREFILL,
    BootstrapInfo,
    CompletionUsage,
    PrefillResult,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)


def a_request(**fields: object) -> PreprocessedRequest:
    return PreprocessedRequest("m", [1, 2, 3], **fields)  # type: ignore[arg-type]


def test_deprecated_role_flags_are_equivalent_and_conflict_with_a_mode() -> None:
    assert mode_of(None) is DisaggregationMode.AGGREGATED
    assert mode_of("prefill") is DisaggregationMode.PREFILL
    assert mode_of(None, is_prefill_worker=True) is DisaggregationMode.PREFILL
    assert mode_of(None, is_decode_worker=True) is DisaggregationMode.DECODE
    with pytest.raises(ConfigError, match="--is-prefill-worker"):
        mode_of("agg", is_prefill_worker=True)
    with pytest.raises(ConfigError, match="--is-decode-worker"):
        mode_of(None, is_prefill_worker=True, is_decode_worker=True)


def test_disaggregation_modes_have_the_roles_of_upstream_cards() -> None:
    roles = {mode: (mode.worker_type, mode.component, mode.needs) for mode in DisaggregationMode}
    assert roles[DisaggregationMode.AGGREGATED] == ("aggregated", "backend", [])
    assert roles[DisaggregationMode.PREFILL] == ("prefill", "prefill", [["decode"]])
    assert roles[DisaggregationMode.DECODE] == ("decode", "backend", [["prefill"]])
    assert roles[DisaggregationMode.ENCODE] == ("encode", "encode", [])
    assert [mode for mode in DisaggregationMode if mode.answers_clients] == [
        DisaggregationMode.AGGREGATED,
        DisaggregationMode.DECODE,
    ]
    assert DisaggregationMode.PREFILL.publishes_cache
    assert not DisaggregationMode.DECODE.publishes_cache


def test_prefill_request_is_limited_to_one_choice_of_one_token() -> None:
    given = a_request(
        stop_conditions=StopConditions(max_tokens=90, min_tokens=20, stop=["end"], ignore_eos=True),
        sampling_options=SamplingOptions(n=4, best_of=5, temperature=0.5),
    )
    clamped = prefill_request(given)
    assert clamped.stop_conditions == StopConditions(max_tokens=1, min_tokens=1, stop=["end"], ignore_eos=True)
    assert clamped.sampling_options == SamplingOptions(n=1, temperature=0.5)
    assert given.stop_conditions.max_tokens == 90
    assert prefill_request(a_request()).sampling_options == SamplingOptions()


def test_prefill_output_has_upstream_keys() -> None:
    output = prefill_output([7], {"at": 1}, CompletionUsage(3, 1, 4), engine_data={"kv_cache_hit": 2})
    assert msgspec.to_builtins(output) == {
        "token_ids": [7],
        "index": 0,
        "finish_reason": "length",
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        "disaggregated_params": {"at": 1},
        "engine_data": {"kv_cache_hit": 2},
    }


def test_prefill_result_is_read_from_the_request() -> None:
    sent = msgpack_encode({"model": "m", "token_ids": [1], "prefill_result": {"disaggregated_params": {"at": 1}}})
    request = decode(sent, "msgpack", PreprocessedRequest)
    assert prefill_result_of(request) == PrefillResult({"at": 1})
    assert prefill_source_of(request) == PrefillResult({"at": 1})


def test_decode_worker_requires_a_prefill_result_unless_bypassed() -> None:
    with pytest.raises(InvalidArgument, match="prefill_result"):
        prefill_result_of(a_request())
    with pytest.raises(InvalidArgument, match="prefill_result"):
        prefill_result_of(a_request(prefill_result=None))
    assert prefill_result_of(a_request(annotations=[BYPASS_REMOTE_PREFILL])) is None


def test_bootstrap_info_round_trips_in_a_request() -> None:
    meeting = BootstrapInfo("host", 9, 2**62, b"0123456789abcdef")
    read = decode(msgpack_encode(a_request(bootstrap_info=meeting)), "msgpack", PreprocessedRequest)
    assert bootstrap_of(read) == meeting
    assert prefill_source_of(read) == meeting
    assert bootstrap_of(a_request()) is None


def test_request_without_prefill_result_is_marked_for_local_prefill() -> None:
    lost = a_request(prefill_result=PrefillResult({"at": 1}), bootstrap_info=BootstrapInfo("h", 1, 2))
    whole = without_prefill(lost)
    assert must_prefill_here(whole)
    assert prefill_source_of(whole) is None
    assert without_prefill(whole).annotations == [BYPASS_REMOTE_PREFILL]
    assert b"prefill_result" not in msgpack_encode(whole)


@pytest.mark.parametrize(
    ("text", "seconds"), [("", DRAIN_TIMEOUT_S), ("2.5", 2.5), ("-1", 0.0), ("inf", DRAIN_TIMEOUT_S), ("x", 30.0)]
)
def test_invalid_drain_timeout_uses_the_default(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("DYN_PREFILL_DRAIN_TIMEOUT_S", text)
    assert drain_timeout_s() == seconds
