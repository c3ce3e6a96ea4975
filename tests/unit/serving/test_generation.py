"""From tokens to pieces: how a generation processes a worker's messages."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.codec import json_encode, msgpack_encode
from dynamo.core.errors import Cancelled, Disconnected, Unknown
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
    TopLogprob,
)
from dynamo.runtime.request_plane.base import Item
from dynamo.serving.choice import Choice
from dynamo.serving.generation import Generation, total_usage
from dynamo.text.detokenizer import TokenTable, text_json_of

WORDS = ["<eos>", "Hello", " world", "!", '"', "\n", "é", "STOP", "ST", "OP", " "]
RAW = [word.encode() for word in WORDS] + [b"\xe2\x82", b"\xac"]
EURO = (len(WORDS), len(WORDS) + 1)
TABLE = TokenTable(RAW, text_json_of(RAW), skipped=frozenset({0}))


@dataclass
class ReceivedOutput:
    """Receiver that records its messages."""

    touched: list[Choice] = field(default_factory=list)
    over: list[Generation] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    is_whole: bool = False

    def touch(self, choice: Choice) -> None:
        self.touched.append(choice)

    def ended(self, generation: Generation) -> None:
        self.over.append(generation)

    def failed(self, generation: Generation, error: Exception) -> None:
        self.errors.append(error)


@dataclass
class WorkerCall:
    """Call that records how it was ended."""

    instance_id: int = 9
    ends: list[str] = field(default_factory=list)

    def stop(self) -> None:
        self.ends.append("stop")

    def kill(self) -> None:
        self.ends.append("kill")


Make = Callable[..., tuple[Generation, ReceivedOutput, WorkerCall]]


def make(**stop: object) -> tuple[Generation, ReceivedOutput, WorkerCall]:
    sampling = SamplingOptions(
        n=stop.pop("n", None),  # type: ignore[arg-type]
        include_stop_str_in_output=stop.pop("include", None),  # type: ignore[arg-type]
    )
    output = OutputOptions(logprobs=stop.pop("logprobs", None))  # type: ignore[arg-type]
    conditions = StopConditions(stop_token_ids_hidden=[0], **stop)  # type: ignore[arg-type]
    request = PreprocessedRequest(
        "m", [1, 2, 3], stop_conditions=conditions, sampling_options=sampling, output_options=output
    )
    received, call = ReceivedOutput(), WorkerCall()
    generation = Generation(request, TABLE, received, 0)
    generation.call = call
    return generation, received, call


def item(token_ids: list[int], index: int = 0, **rest: object) -> Item:
    return Item(msgpack_encode(EngineOutput(token_ids, index, **rest)))  # type: ignore[arg-type]


def test_generation_converts_tokens_to_json_pieces_and_notifies_the_response_once_per_batch() -> None:
    generation, received, _ = make()
    for token in (1, 2, 4, 5):
        generation.on_token(token)
    assert generation.choices[0].pieces == [b"Hello", b" world", b'\\"', b"\\n"]
    assert len(received.touched) == 1
    assert generation.choices[0].text() == 'Hello world"\n'


def test_generation_joins_a_character_split_across_tokens() -> None:
    generation, _, _ = make()
    for token in (1, *EURO, 3):
        generation.on_token(token)
    assert generation.choices[0].text() == "Hello€!"


def test_generation_replaces_an_incomplete_character_at_the_end() -> None:
    generation, received, _ = make()
    generation.on_token(EURO[0])
    generation.on_item(item([], finish_reason="length"))
    generation.on_end()
    assert generation.choices[0].text() == "�"
    assert received.over == [generation]


def test_generation_ends_with_the_last_item_and_hides_its_stop_token() -> None:
    generation, received, _ = make()
    generation.on_token(1)
    usage = CompletionUsage(3, 2, 5)
    generation.on_item(item([0], finish_reason="eos", completion_usage=usage))
    assert received.over == []
    generation.on_end()
    assert (generation.choices[0].text(), generation.choices[0].finish_reason) == ("Hello", "stop")
    assert generation.counted() == usage


def test_generation_counts_tokens_when_the_engine_reports_no_usage() -> None:
    generation, _, _ = make()
    generation.on_token(1)
    generation.on_item(item([2], finish_reason="length"))
    generation.on_end()
    assert generation.counted() == CompletionUsage(3, 2, 5)


@given(st.data())
def test_generation_stop_string_ends_the_text_at_any_token_split(data: st.DataObject) -> None:
    cut = data.draw(st.sampled_from([[7], [8, 9]]))
    include = data.draw(st.booleans())
    before = data.draw(st.lists(st.sampled_from([1, 2, 3, 6, 8, 10]), max_size=6))
    generation, received, call = make(stop=["STOP"], include=include)
    for token in [*before, *cut, 3, 3]:
        generation.on_token(token)
    text = "".join(WORDS[token] for token in before)
    assert generation.choices[0].text() == text + ("STOP" if include else "")
    assert generation.choices[0].finish_reason == "stop"
    assert call.ends == ["kill"]
    assert len(received.over) == 1


def test_generation_releases_a_stop_string_prefix_at_the_end() -> None:
    generation, _, _ = make(stop=["STOP"])
    generation.on_token(8)
    assert generation.choices[0].pieces == []
    generation.on_item(item([3], finish_reason="length"))
    assert generation.choices[0].text() == "ST!"


def test_generation_keeps_logprobs_for_each_visible_token() -> None:
    generation, _, _ = make(logprobs=1)
    top = [[TopLogprob(rank=1, token_id=2, logprob=-0.1), TopLogprob(rank=2, token_id=3, logprob=-3.0)]]
    generation.on_item(item([1], log_probs=[-1.5], top_logprobs=top))
    generation.on_item(item([0], log_probs=[-0.2], finish_reason="eos"))
    entries = generation.choices[0].entries
    assert entries is not None
    assert [(one.text, one.logprob, one.top) for one in entries] == [("Hello", -1.5, [(" world", b" world", -0.1)])]


def test_generation_separates_choices_and_ends_with_the_last() -> None:
    generation, received, _ = make(n=2)
    generation.on_item(item([1], index=1))
    generation.on_item(item([2], index=0, finish_reason="length", completion_usage=CompletionUsage(3, 1, 4)))
    generation.on_item(item([3], index=1, finish_reason="length", completion_usage=CompletionUsage(3, 2, 5)))
    generation.on_end()
    assert [choice.text() for choice in generation.choices] == [" world", "Hello!"]
    assert generation.counted().completion_tokens == 3
    assert len(received.over) == 1


def test_choice_index_out_of_range_is_a_worker_error() -> None:
    generation, received, call = make()
    generation.on_item(item([1], index=1))
    assert isinstance(received.errors[0], Unknown)
    assert call.ends == ["kill"]


def test_unreadable_worker_output_is_an_unknown_error() -> None:
    generation, received, _ = make()
    generation.on_item(Item(b"\xc1nonsense"))
    assert isinstance(received.errors[0], Unknown)


@pytest.mark.parametrize("index", [{"index": 0}, {"index": None}, {}])
def test_json_workers_are_understood(index: dict[str, int | None]) -> None:
    generation, _, _ = make()
    generation.on_item(Item(json_encode({"token_ids": [1, 2], **index}), codec="json"))
    assert generation.choices[0].text() == "Hello world"


@pytest.mark.parametrize(("reason", "kind"), [("error:out of memory", Unknown), ("cancelled", Cancelled)])
def test_finish_reason_that_is_no_success_is_an_error(reason: str, kind: type[Exception]) -> None:
    generation, received, _ = make()
    generation.on_item(item([1], finish_reason=reason))
    assert isinstance(received.errors[0], kind)


def test_stream_that_ends_without_output_is_an_empty_first_choice() -> None:
    generation, received, _ = make()
    generation.on_end()
    assert not received.errors
    assert generation.is_over
    assert [(one.index, one.finish_reason, one.pieces) for one in generation.choices] == [(0, "stop", [])]


def test_generation_ignores_messages_after_its_end() -> None:
    generation, received, _ = make()
    generation.on_error(Disconnected("gone"))
    generation.on_error(Disconnected("gone again"))
    generation.on_item(item([1], finish_reason="length"))
    generation.on_end()
    assert len(received.errors) == 1
    assert received.over == []


def test_generation_without_output_can_be_retried_after_a_disconnect() -> None:
    generation, received, _ = make()
    generation.on_error(Disconnected("gone"))
    assert generation.failed_instance == 9
    generation.revive()
    generation.on_token(1)
    generation.on_item(item([], finish_reason="length"))
    generation.on_end()
    assert received.over == [generation]


def test_generation_cancel_kills_the_call_and_suppresses_later_errors() -> None:
    generation, received, call = make()
    generation.cancel()
    generation.on_error(Disconnected("gone"))
    assert call.ends == ["kill"]
    assert received.errors == []


def test_unknown_token_id_produces_no_text() -> None:
    generation, _, _ = make()
    generation.on_token(10_000)
    assert generation.choices[0].text() == ""


def test_usage_of_a_batch_is_the_sum_of_its_generations() -> None:
    first, second = make()[0], make()[0]
    first.on_token(1)
    second.on_token(1)
    second.on_token(2)
    assert total_usage([first, second]) == CompletionUsage(6, 3, 9)


def test_generation_accepts_fewer_choices_than_requested() -> None:
    generation, received, _ = make(n=3)
    generation.on_item(item([1], finish_reason="length"))
    generation.on_end()
    assert [choice.text() for choice in generation.choices] == ["Hello"]
    assert received.over == [generation]


@pytest.mark.parametrize("cut_first", [True, False])
def test_generation_does_not_count_tokens_after_a_stop_string(cut_first: bool) -> None:
    generation, received, _ = make(stop=["STOP"], n=2)
    cut = [item([7], 0), item([1, 1], 0, finish_reason="length", completion_usage=CompletionUsage(3, 3, 6))]
    whole = [item([1], 1, finish_reason="length", completion_usage=CompletionUsage(3, 1, 4))]
    for piece in cut + whole if cut_first else whole + cut:
        generation.on_item(piece)
    generation.on_end()
    assert received.over == [generation]
    assert generation.counted() == CompletionUsage(3, 2, 5)


def test_generation_ignores_tokens_of_a_stopped_choice() -> None:
    generation, received, _ = make(stop=["STOP"], n=2)
    generation.on_token(7)
    touched = len(received.touched)
    generation.on_token(1)
    assert (len(received.touched), generation.tokens) == (touched, 1)
    generation.on_item(item([1], 1, finish_reason="length"))
    generation.on_end()
    assert generation.counted() == CompletionUsage(3, 2, 5)


def test_hidden_stop_token_ends_the_text_while_the_worker_still_sends() -> None:
    generation, received, call = make()
    generation._texts = [None, *generation._texts[1:]]  # As the model's table marks tokens that may end a text.
    for token in (1, 2, 0, 3):
        generation.on_token(token)
    assert generation.choices[0].text() == "Hello world"
    assert generation.choices[0].finish_reason == "stop"
    assert call.ends == ["kill"]
    assert received.over == [generation]


def test_hidden_stop_token_in_an_item_ends_the_text() -> None:
    generation, received, _ = make(logprobs=0)
    generation.on_item(item([1, 0, 2], log_probs=[-1.0, -1.0, -1.0]))
    assert generation.choices[0].text() == "Hello"
    assert received.over == [generation]
