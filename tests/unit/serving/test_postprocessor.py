"""Response bytes are the JSON that clients expect."""

import json

import pytest

from dynamo.protocols.engine import CompletionUsage, TopLogprob
from dynamo.serving.postprocessor import ChatChunks, CompletionChunks, TokenEntry, alternatives

KINDS = [ChatChunks, CompletionChunks]
ENTRY = TokenEntry(7, "hé", "hé".encode(), -0.5, [("hé", "hé".encode(), -0.5), ("x", b"x", -2.0)])


def event(data: bytes) -> dict:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n\n") == 1
    return json.loads(data[6:])


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_joined_from_head_text_and_tail_are_one_event_each(kind: type[ChatChunks]) -> None:
    chunks = kind("id-1", 'a "quoted" model', 17)
    head, tail = chunks.head(3), chunks.tail()
    data = head + (tail + head).join([b"one", b"two\\n", b"three"]) + tail
    events = [event(part + b"\n\n") for part in data.split(b"\n\n")[:-1]]
    choices = [one["choices"][0] for one in events]
    assert [one.get("text", one.get("delta", {}).get("content")) for one in choices] == ["one", "two\n", "three"]
    assert all(one["index"] == 3 and one["finish_reason"] is None for one in choices)
    assert all((one["id"], one["model"], one["created"]) == ("id-1", 'a "quoted" model', 17) for one in events)


def test_chat_chunks_open_with_the_role_and_close_with_the_finish_reason() -> None:
    chunks = ChatChunks("i", "m", 1)
    assert event(chunks.first(0))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert event(chunks.finish(0, "length", None))["choices"][0]["finish_reason"] == "length"


def test_completion_chunks_have_no_opening_and_close_with_an_empty_text() -> None:
    chunks = CompletionChunks("i", "m", 1)
    assert chunks.first(0) == b""
    closing = event(chunks.finish(0, "stop", None))
    assert closing["choices"][0] == {"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}
    assert closing["usage"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_usage_chunk_has_no_choices(kind: type[ChatChunks]) -> None:
    last = event(kind("i", "m", 1).usage(CompletionUsage(3, 4, 7)))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


@pytest.mark.parametrize("kind", KINDS)
def test_continuous_usage_is_part_of_the_chunk(kind: type[ChatChunks]) -> None:
    chunks = kind("i", "m", 1)
    one = event(chunks.head(0) + b"text" + chunks.tail(b'{"total_tokens":5}'))
    assert one["usage"] == {"total_tokens": 5}


def test_chat_logprobs_carry_the_bytes_of_each_token() -> None:
    one = event(ChatChunks("i", "m", 1).text_with_logprobs(0, b"h\xc3\xa9", [ENTRY], 0))["choices"][0]
    assert one["delta"]["content"] == "hé"
    content = one["logprobs"]["content"][0]
    assert (content["token"], content["bytes"], content["logprob"]) == ("hé", [104, 195, 169], -0.5)
    assert [top["token"] for top in content["top_logprobs"]] == ["hé", "x"]


def test_completion_logprobs_count_characters_from_the_start_of_the_choice() -> None:
    one = event(CompletionChunks("i", "m", 1).text_with_logprobs(0, b"h\xc3\xa9x", [ENTRY, ENTRY], 10))["choices"][0]
    assert one["logprobs"]["text_offset"] == [10, 12]
    assert one["logprobs"]["tokens"] == ["hé", "hé"]


def test_logprob_alternatives_are_ordered_by_rank() -> None:
    tops = [TopLogprob(rank=2, token_id=5), TopLogprob(rank=1, token_id=9), TopLogprob(rank=3, token_id=1)]
    assert [one.token_id for one in alternatives(tops, 2)] == [9, 5]
