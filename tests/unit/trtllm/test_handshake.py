"""Handshake of TensorRT-LLM: ids that no two workers share, and parameters that travel as plain values."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.trtllm.scripted import DisaggregatedParams, Logprob

from dynamo.core.errors import InvalidArgument
from dynamo.trtllm.handshake import MACHINES, RequestIds, from_wire, to_wire

KNOWN = frozenset(one.name for one in dataclasses.fields(DisaggregatedParams))


@given(st.integers(0, (1 << 64) - 1), st.floats(1e9, 4e9))
def test_request_ids_are_positive_unique_and_contain_the_machine_id(connection: int, now: float) -> None:
    ids = RequestIds(connection)
    found = [ids.next(now) for _ in range(20)]
    assert len(set(found)) == 20
    assert all(0 < one < 1 << 63 for one in found)
    assert {one >> 14 & 1023 for one in found} == {connection % MACHINES}


@given(
    st.builds(
        DisaggregatedParams,
        first_gen_tokens=st.lists(st.integers(0, 9), max_size=3),
        opaque_state=st.none() | st.binary(max_size=20),
        draft_tokens=st.none() | st.lists(st.integers(0, 9)),
        disagg_request_id=st.none() | st.integers(0, 1 << 62),
        first_gen_log_probs=st.none()
        | st.lists(
            st.lists(
                st.lists(
                    st.dictionaries(
                        st.integers(0, 9), st.builds(Logprob, st.floats(-9, 0), st.integers(1, 5)), max_size=2
                    ),
                    max_size=2,
                ),
                min_size=1,
                max_size=2,
            ),
            max_size=2,
        ),
    )
)
def test_disaggregated_params_round_trip(params: DisaggregatedParams) -> None:
    message = json.loads(json.dumps(to_wire(params)))
    found = DisaggregatedParams(**from_wire(message, Logprob, KNOWN))
    assert found == params


def test_unknown_disaggregated_params_are_dropped() -> None:
    message = {"first_gen_tokens": [1], "request_type": "context_only", "of_tomorrow": 1}
    assert from_wire(message, Logprob, KNOWN) == {"first_gen_tokens": [1]}


@pytest.mark.parametrize(
    "message",
    [None, "x", {}, {"first_gen_tokens": [1], "opaque_state": "%"}, {"first_gen_tokens": [1], "opaque_state": 5}],
)
def test_malformed_prefill_result_is_refused(message: object) -> None:
    with pytest.raises(InvalidArgument, match="prefill_result"):
        from_wire(message, Logprob, KNOWN)
