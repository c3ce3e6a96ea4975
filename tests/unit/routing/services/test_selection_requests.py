"""Requests of the selection service: prompts as tokens or hashes, and their errors."""

import pytest

from dynamo.core.errors import SelectionServiceError
from dynamo.kv_router.runs import unpack
from dynamo.kv_router.tracking import TrackingKey
from dynamo.routing.services.selection_requests import PromptBody, failed, route_request_of, sequence_of

TOKENS = list(range(40))


def test_tokens_and_their_hashes_give_the_same_request() -> None:
    by_tokens = route_request_of(PromptBody(token_ids=TOKENS), 16)
    signed = [one - (1 << 64) if one >> 63 else one for one in unpack(by_tokens.blocks)]
    by_hashes = route_request_of(PromptBody(block_hashes=signed, isl_tokens=40), 16)
    assert by_hashes.blocks == by_tokens.blocks and len(by_tokens.blocks) == 2 * 8
    assert by_hashes.tokens == by_tokens.tokens == 40


def test_hashes_without_a_length_count_as_full_blocks() -> None:
    assert route_request_of(PromptBody(block_hashes=[1, 2, 3]), 16).tokens == 48


def test_a_prompt_without_tokens_and_hashes_is_invalid() -> None:
    with pytest.raises(SelectionServiceError, match="block_hashes is required") as caught:
        route_request_of(PromptBody(), 16)
    assert caught.value.kind == "invalid_request"


def test_a_tracking_key_requires_tokens_and_separates_models() -> None:
    key = TrackingKey("key-1", b"k" * 32)
    with pytest.raises(SelectionServiceError, match="token_ids is required"):
        sequence_of(PromptBody(block_hashes=[1]), 16, b"12345678", key)
    one, other = (sequence_of(PromptBody(token_ids=TOKENS, model_name=name), 16, b"", key) for name in "ab")
    assert one != other and len(one) == len(other) == 2 * 8


def test_errors_have_the_status_of_their_kind() -> None:
    assert failed("conflict", "x").status_code == 409
