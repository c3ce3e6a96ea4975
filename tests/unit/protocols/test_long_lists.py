"""Long lists of token ids are decoded in parts, with the result of a decoder that takes the whole body."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.protocols import long_lists as parts
from dynamo.protocols.long_lists import LIST_BYTES, PART_BYTES, TOKENS_MAX, decode_in_parts, long_lists
from dynamo.protocols.native import decode_vllm
from dynamo.protocols.openai import CompletionRequest, decode_chat, decode_completion

MANY = 120_000
IDS = [300 + number % 1000 for number in range(MANY)]


def body_of(**members: Any) -> bytes:
    return json.dumps({"model": "m", **members}).encode()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The texts that were decoded as lists of ids."""
    seen: list[bytes] = []
    ids = parts._ids

    def count(text: bytes) -> list[int]:
        seen.append(text)
        return ids(text)

    monkeypatch.setattr(parts, "_ids", count)
    return seen


def test_prompt_is_decoded_in_parts(decoded: list[bytes]) -> None:
    body = body_of(prompt=IDS, stop=['"[1,2,3]'], user="[" * 20_000)
    request = decode_completion(body)
    assert (request.prompt, request.stop, request.user) == (IDS, ['"[1,2,3]'], "[" * 20_000)
    assert len(decoded) > 4
    assert max(map(len, decoded)) < PART_BYTES + 10
    assert sum(map(len, decoded)) > 0.9 * (len(body) - 20_000)


def test_every_prompt_of_a_batch_is_decoded_alone(decoded: list[bytes]) -> None:
    prompts = [IDS[:8000] for _ in range(20)]
    assert decode_completion(body_of(prompt=prompts)).prompt == prompts
    assert len(decoded) == len(prompts)


def test_ids_within_a_field_are_decoded_in_parts(decoded: list[bytes]) -> None:
    user = [{"role": "user", "content": 'say "[1, 2]" \\'}]
    request = decode_chat(body_of(messages=user, nvext={"token_data": IDS}))
    assert request.nvext is not None
    assert request.nvext.token_data == IDS
    assert request.messages[0].content == 'say "[1, 2]" \\'
    assert len(decoded) > 4


def test_ids_of_native_requests_are_decoded_in_parts(decoded: list[bytes]) -> None:
    request, fields = decode_vllm(body_of(token_ids=IDS, sampling_params={}))
    assert request.token_ids == fields["token_ids"] == IDS
    assert len(decoded) > 4


@pytest.mark.parametrize(
    "body",
    [
        body_of(prompt=IDS, metadata={"also": IDS}),
        body_of(prompt=IDS, unknown=IDS),
        body_of(prompt=IDS)[:-1] + b',"prompt":' + json.dumps(IDS[::-1]).encode() + b"}",
        body_of(prompt=[1] * 2, user="x" * (1 << 18)),
        body_of(user="\\" * 33 + '"' + json.dumps(IDS), prompt=[1]),
    ],
    ids=["two fields", "dropped", "field twice", "short list", "backslashes"],
)
def test_result_is_that_of_the_whole_body(body: bytes) -> None:
    whole = json.loads(body)
    request = decode_completion(body, ignore_unsupported=True)
    assert request.prompt == whole["prompt"]
    assert (request.metadata, request.user) == (whole.get("metadata"), whole.get("user"))


@pytest.mark.parametrize(
    "ids",
    [
        json.dumps(IDS)[:-1] + ",]",
        "[," + json.dumps(IDS)[1:],
        json.dumps(IDS).replace(", 1299, 300, 301, 302,", ", 1299,, 300, 301, 302,"),
        json.dumps([*IDS, -1]),
        json.dumps([*IDS, 1 << 32]),
        json.dumps([*IDS, 1.5]),
        json.dumps([*IDS, "a"]),
        json.dumps(IDS)[:-1],
        "[" + " " * (2 * PART_BYTES) + "]",
        "[[" + json.dumps(IDS)[1:-1] + "]]]",
    ],
    ids=["last comma", "first comma", "two commas", "negative", "large", "fraction", "text", "open", "empty", "closed"],
)
def test_invalid_list_has_the_error_of_the_whole_body(ids: str) -> None:
    body = b'{"model":"m","prompt":%b}' % ids.encode()
    with pytest.raises(InvalidArgument) as found:
        decode_completion(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "long_lists", lambda _: [])
        with pytest.raises(InvalidArgument) as expected:
            decode_completion(body)
    assert str(found.value) == str(expected.value)


def test_body_with_many_strings_is_decoded_at_once() -> None:
    body = body_of(prompt=IDS, stop=["a"] * (TOKENS_MAX + 1))
    assert long_lists(body_of(prompt=IDS)) and long_lists(body_of(stop=["a"] * 100, prompt=IDS))
    assert not long_lists(body_of(stop=["a"] * (TOKENS_MAX + 1), prompt=IDS))
    assert not long_lists(body)
    assert not long_lists(b"[" + b"[]," * (TOKENS_MAX * 8) + b"1]")
    assert decode_in_parts(body, lambda _: pytest.fail("not decoded in parts")) is None


LONG = "7, " * (LIST_BYTES // 3)
TEXTS = st.text(st.sampled_from('"\\[]{},1 a'), max_size=12)


@given(st.lists(st.one_of(TEXTS, st.just(LONG), st.just(None))))
def test_list_is_never_found_in_a_string(texts: list[str | None]) -> None:
    """A list is found where there is one, and not in a string, whatever quotes and backslashes are around."""
    lists = [f"[{LONG}7]" if one is None else json.dumps(one) for one in texts]
    body = f"[{', '.join(lists)}]".encode()
    assert [body[start:end] for start, end in long_lists(body)] == [f"[{LONG}7]".encode()] * texts.count(None)


def test_placeholder_of_another_request_is_no_list() -> None:
    """Every request has other names, so that a client cannot write one."""
    seen: list[bytes] = []

    def decode(short: bytes) -> CompletionRequest:
        seen.append(short)
        return CompletionRequest(model="m", prompt=[1, 2])

    for _ in range(2):
        assert decode_in_parts(body_of(prompt=IDS), decode) is None
    assert len(set(seen)) == 2
