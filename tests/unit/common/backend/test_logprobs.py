"""Log probabilities of vLLM, TensorRT-LLM and SGLang."""

import logging
from types import SimpleNamespace

import pytest

from dynamo.common.backend import logprobs


def alternative(logprob: float, rank: int, text: str | None) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank, decoded_token=text)


class FailingTokenizer:
    """A tokenizer that decodes nothing."""

    def decode(self, token_ids: list[int]) -> str:
        raise RuntimeError("no such token")


def test_log_probabilities_of_one_chunk_match_its_tokens() -> None:
    positions = [{7: alternative(-0.1, 1, "a")}, {8: alternative(-0.2, 2, None), 9: alternative(-0.1, 1, "b")}]
    output = SimpleNamespace(token_ids=[7, 8], logprobs=positions)
    chosen, top = logprobs.extract_from_completion_output(output, 1, FailingTokenizer(), include_bytes=True)
    assert chosen == [-0.2]
    assert top == [
        [
            {"rank": 2, "token_id": 8, "token": None, "logprob": -0.2, "bytes": None},
            {"rank": 1, "token_id": 9, "token": "b", "logprob": -0.1, "bytes": [98]},
        ]
    ]
    missing = SimpleNamespace(token_ids=[1], logprobs=[{7: alternative(-0.1, 1, "a")}])
    assert logprobs.extract_from_completion_output(missing, 0) == (None, None)
    assert logprobs.extract_from_completion_output(missing, 0, fallback_to_first_on_missing=True)[0] == [-0.1]


def test_prompt_log_probabilities_keep_positions_without_one() -> None:
    output = SimpleNamespace(prompt_logprobs=[None, {7: alternative(-0.5, 1, None)}])
    expected = [None, {"7": {"logprob": -0.5, "rank": 1}}]
    assert logprobs.extract_prompt_logprobs_from_completion_output(output, FailingTokenizer()) == expected
    meta = {"input_token_logprobs": [(None, 6, None), (-0.5, 7, "a")], "input_top_logprobs": [None, [(-1, 8, None)]]}
    found = logprobs.extract_prompt_logprobs_from_sglang_meta(meta)
    assert found == [None, {"7": {"logprob": -0.5, "decoded_token": "a"}, "8": {"logprob": -1.0}}]


def test_sglang_log_probabilities_are_ranked_by_position() -> None:
    meta = {"output_token_logprobs": [(-0.1, 1, "a")], "output_top_logprobs": [[(-0.1, 1, "a"), (-2, 5, "e")]]}
    chosen, top = logprobs.extract_from_sglang_meta(meta, return_tokens_as_token_ids=True)
    assert chosen == [-0.1]
    assert top is not None
    assert [(one["rank"], one["token"], one["logprob"]) for one in top[0]] == [
        (1, "token_id:1", -0.1),
        (2, "token_id:5", -2.0),
    ]


def test_invalid_number_of_log_probabilities_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert logprobs.parse_logprob_options({"logprobs": "x", "prompt_logprobs": -1}) == (None, None)
    assert [record.getMessage() for record in caplog.records] == [
        "ignored logprobs='x': must be an integer of 0 or more",
        "ignored prompt_logprobs=-1: must be an integer of 0 or more",
    ]
