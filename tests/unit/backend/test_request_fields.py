"""Request fields that every engine's adapter reads."""

import pytest
from tests.unit.vllm.conftest import request

from dynamo.backend.request_fields import ends_of, hidden_ends_of, json_text, media_of, rank_of, refusal_of
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.engine import StopConditions


def test_stop_token_ids_include_visible_and_hidden_ones_once() -> None:
    stop = StopConditions(stop_token_ids=[5, 9], stop_token_ids_visible=[4], stop_token_ids_hidden=[3])
    assert ends_of(request(stop=stop)) == [3, 4, 5, 9]
    assert hidden_ends_of(request(stop=stop)) == {3, 9}
    stop.ignore_eos = True
    assert ends_of(request(stop=StopConditions(ignore_eos=True))) == []
    assert hidden_ends_of(request(stop=stop)) == {3}


def test_dp_rank_is_relative_to_the_first_rank_of_the_worker() -> None:
    assert rank_of(None, 2, 4) is None
    assert rank_of(5, 2, 4) == 1
    assert rank_of(4, 1, 4) is None
    with pytest.raises(InvalidArgument, match="has 4 to 5"):
        rank_of(6, 2, 4)


def test_decoded_media_without_url_is_refused() -> None:
    shown = {"image_url": [{"Url": "a"}, {"Url": "b"}], "audio_url": [{"Url": "c"}]}
    assert media_of(request(multi_modal_data=shown)) == {"image_url": ["a", "b"], "audio_url": ["c"]}
    assert media_of(request()) == {}
    with pytest.raises(InvalidArgument, match="Decoded"):
        media_of(request(multi_modal_data={"image_url": [{"Decoded": "x"}]}))


def test_guided_schemas_are_passed_to_engines_as_text() -> None:
    assert json_text({"a": 1}) == '{"a":1}'
    assert json_text("{}") == "{}"
    assert json_text(None) is None


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (ValueError("temperature must be non-negative, got -1.0."), "temperature"),
        (ValueError("`max_new_tokens` must be at least 0"), "max_tokens"),
        (ValueError("Failed to parse json_schema: unexpected end"), "response_format"),
        (ValueError("not enough values to unpack (expected 2, got 1)"), None),
        (ValueError("the engine stopped"), None),
        (TypeError("temperature must be a number"), None),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "temperature"), None),
    ],
)
def test_engine_value_error_is_a_refusal_only_if_it_names_a_parameter(error: Exception, param: str | None) -> None:
    refusal = refusal_of(error)
    assert (None if refusal is None else refusal.param) == param
