"""Request bodies are decoded inline, in a thread or after a trial, depending on their decoding time."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dynamo.core.child_pool import ChildError, ChildOutOfMemory, ChildPoolBusy, ChildTimeout, ChildUnwanted
from dynamo.core.errors import Cancelled, DynamoException, InvalidArgument, Overloaded, Unknown
from dynamo.http import body_child
from dynamo.http.body_child import FRACTIONS_MAX, KEYS_MAX, SLOW_NUMBERS_MAX, check
from dynamo.serving import bodies
from dynamo.serving.bodies import check_slow, decoded, estimated_s, slow_numbers
from dynamo.text.multimodal.source import environment_limits

USER = {"role": "user", "content": ""}


class Pool:
    """Pool whose child is scripted."""

    def __init__(self, outcome: Exception | None = None) -> None:
        self.outcome = outcome
        self.kinds: list[str] = []

    def call(self, request: tuple[str], data: bytes, *, is_wanted: Callable[[], bool] | None) -> None:
        self.kinds += request
        if is_wanted is not None and not is_wanted():
            raise ChildUnwanted
        if self.outcome is not None:
            raise self.outcome


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    made = Pool()
    monkeypatch.setattr(bodies, "_pool", lambda: made)
    return made


async def where(body: bytes, kind: str = "chat") -> str:
    return await decoded(bytearray(body), lambda _: threading.current_thread().name, kind)


def chat(messages: list[Any]) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": messages})


async def test_small_body_is_decoded_on_the_loop(pool: Pool) -> None:
    assert await where(chat([USER])) == threading.current_thread().name
    assert await where(chat([{"role": "user", "content": "some words, " * 10_000}])) == threading.current_thread().name
    assert not pool.kinds


async def test_large_body_is_decoded_in_a_thread(pool: Pool) -> None:
    assert await where(chat([{"role": "user", "content": "x" * 1_000_000}])) != threading.current_thread().name
    assert await where(chat([USER] * 5000)) != threading.current_thread().name
    assert not pool.kinds


async def test_body_of_many_values_is_tried_first(pool: Pool) -> None:
    await where(chat([USER] * 200_000))
    await where(chat([USER] * 200_000), kind="")
    assert pool.kinds == ["chat"]


def test_only_a_slow_body_is_checked_in_a_child(pool: Pool) -> None:
    check_slow(chat([USER]), "batch_line", lambda: True)
    assert not pool.kinds
    check_slow(b'{"body":[' + b"[]," * 1_000_000 + b"0]}", "batch_line", lambda: True)
    assert pool.kinds == ["batch_line"]
    pool.outcome = ChildPoolBusy()
    with pytest.raises(Overloaded):
        check_slow(chat([USER] * 200_000), "batch_line", lambda: True)
    with pytest.raises(Cancelled):
        check_slow(chat([USER] * 200_000), "batch_line", lambda: False)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (InvalidArgument("messages has too many", param="messages"), InvalidArgument),
        (ChildTimeout(), InvalidArgument),
        (ChildOutOfMemory(), InvalidArgument),
        (ChildPoolBusy(), Overloaded),
        (ChildError(), Unknown),
    ],
)
async def test_body_that_fails_its_trial_is_not_decoded(
    pool: Pool, outcome: Exception, expected: type[DynamoException]
) -> None:
    pool.outcome = outcome
    with pytest.raises(expected):
        await decoded(bytearray(chat([USER] * 200_000)), lambda _: pytest.fail("it was decoded"), "chat")


def test_estimate_grows_with_size_and_values() -> None:
    text, ids = bytearray(b"x" * 1_000_000), bytearray(b"1," * 500_000)
    assert estimated_s(bytearray()) == 0
    assert estimated_s(text) < estimated_s(ids) < estimated_s(bytearray(b"{}" * 500_000))


def test_child_bounds_objects_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    check(("chat", chat([{"role": "user", "content": "hi"}])))
    with pytest.raises(InvalidArgument, match="messages has 20000 entries"):
        check(("chat", chat([USER] * 20_000)))
    many = msgspec.json.encode(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "metadata": [{}] * 200_000}
    )
    with pytest.raises(InvalidArgument, match="more than 65536 objects and lists"):
        check(("chat", many))
    values = msgspec.json.encode(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "metadata": [1] * 1_300_000}
    )
    with pytest.raises(InvalidArgument, match="more than 1114112 values"):
        check(("chat", values))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("completion", {"model": "m", "prompt": "hi"}),
        ("responses", {"model": "m", "input": "hi"}),
        ("input_tokens", {"model": "m", "input": [{"role": "user", "content": "hi"}]}),
        ("messages", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}),
        ("count_tokens", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        ("embeddings", {"model": "m", "input": "hi"}),
        ("classify", {"model": "m", "input": "hi"}),
        ("pooling", {"model": "m", "input": "hi"}),
        ("rerank", {"model": "m", "query": "hi", "documents": ["a"]}),
        ("batch_line", {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}),
        ("vllm", {"model": "m", "token_ids": [1], "sampling_params": {}}),
        ("sglang", {"input_ids": [1]}),
    ],
)
def test_child_decodes_every_kind(kind: str, body: dict[str, Any]) -> None:
    check((kind, msgspec.json.encode(body)))
    with pytest.raises(InvalidArgument):
        check((kind, b"{"))


MEGA = 1 << 20


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "x" * 17 * MEGA},
        {"metadata": {"notes": ["x" * 9 * MEGA] * 2}},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * (MEGA - 1)}}] * 18},
        {"metadata": {"x" * 17 * MEGA: 1}},
    ],
)
def test_child_bounds_text_of_fields_that_have_no_limit(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})
    with pytest.raises(InvalidArgument, match=r"more than 16777216 characters of text .*DYN_HTTP_TEXT_LIMIT_MB"):
        check(("chat", body))


def test_child_does_not_count_media_as_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9 * MEGA}}
    check(("chat", chat([{"role": "user", "content": [image, image]}])))


async def test_body_above_the_text_limit_is_tried_first_although_it_has_few_values(pool: Pool) -> None:
    await where(chat([{"role": "user", "content": "x" * 15 * MEGA}]))
    assert not pool.kinds
    await where(chat([{"role": "user", "content": "x" * 17 * MEGA}]))
    assert pool.kinds == ["chat"]


def test_keys_of_large_objects_are_bounded() -> None:
    few = {f"k{number}": "v" for number in range(KEYS_MAX // 2)}
    check(("event", msgspec.json.encode({"type": "t", "a": few})))
    with pytest.raises(InvalidArgument, match=f"more than {KEYS_MAX} keys in large objects"):
        check(("event", msgspec.json.encode({"type": "t", "a": few, "b": few, "c": few})))


def test_media_of_any_field_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(environment_limits(), data_url_bytes_max=1 << 20)
    monkeypatch.setattr(body_child, "environment_limits", lambda: limits)
    body = {"prompt": "x", "input_reference": "data:image/png;base64," + "A" * (1 << 19)}
    check(("media", msgspec.json.encode(body)))
    body["input_reference"] *= 2
    with pytest.raises(InvalidArgument, match=r"input_reference: .* expected at most 1048576 .DYN_MM_MAX_DATA_URL_MB"):
        check(("media", msgspec.json.encode(body)))


@pytest.mark.parametrize("body", [b"[1]", b"{", b"7", b"\xff"])
@pytest.mark.parametrize("kind", ["event", "media"])
def test_body_that_is_not_an_object_is_refused(kind: str, body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        check((kind, body))


def numbers(number: str, count: int) -> bytes:
    listed = ",".join([number] * count)
    return f'{{"model":"m","messages":[{{"role":"user","content":"hi"}}],"metadata":{{"a":[{listed}]}}}}'.encode()


async def test_small_body_of_slow_numbers_is_not_decoded_on_the_loop(pool: Pool) -> None:
    assert await where(numbers("1e-300", 500)) != threading.current_thread().name
    assert await where(numbers("1.5", 500)) == threading.current_thread().name
    assert not pool.kinds
    await where(numbers("1e+300", 10_000))
    assert pool.kinds == ["chat"]


@pytest.mark.parametrize("number", ["1e300", "1E-300", "1.5e+0290", "9e-310"])
def test_number_with_an_exponent_of_three_digits_is_slow(number: str) -> None:
    assert slow_numbers(numbers(number, 50)) == 50


def test_child_bounds_numbers_that_are_slow_to_decode_but_not_text_like_them() -> None:
    check(("chat", numbers("1e-300", SLOW_NUMBERS_MAX)))
    with pytest.raises(InvalidArgument, match=f"more than {SLOW_NUMBERS_MAX} numbers with exponents of three digits"):
        check(("chat", numbers("1e-300", SLOW_NUMBERS_MAX + 1)))
    check(("chat", chat([{"role": "user", "content": 'a "1e300" ' * 2 * SLOW_NUMBERS_MAX}])))


def test_child_bounds_fractions() -> None:
    check(("chat", numbers("1.5", FRACTIONS_MAX)))
    with pytest.raises(InvalidArgument, match=f"more than {FRACTIONS_MAX} fractions"):
        check(("chat", numbers("1.5", FRACTIONS_MAX + 1)))
