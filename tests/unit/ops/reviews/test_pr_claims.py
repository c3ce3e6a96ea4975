"""Claims of a review: passed, failed, and their evidence."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from dynamo.ops.report import CheckStatus, failed, passed
from dynamo.ops.reviews.pr_claims import (
    evidence_of,
    failure_lines,
    load_command,
    load_row,
    metrics_row,
    same_text_row,
    structure_problem,
)

RESPONSE: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}


def test_failures_are_separated_from_known_noise() -> None:
    log = "Traceback (most recent call last):\nIgnore import error: Traceback\nready\nKilled\n"
    assert failure_lines(log) == ["Traceback (most recent call last):", "Killed"]


def test_complete_response_has_no_problem() -> None:
    assert structure_problem(RESPONSE) == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": None}, "field 'id': expected str, got NoneType"),
        ({"object": "chat"}, "field 'object': expected 'chat.completion', got 'chat'"),
        ({"choices": []}, "field 'choices': empty"),
        ({"choices": [{"message": {"role": "user"}}]}, "choices[0].message.role: expected 'assistant', got 'user'"),
        ({"choices": [{"message": {"role": "assistant"}}]}, "choices[0].finish_reason: missing"),
        (
            {"usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 5}},
            "usage: total_tokens 5 is not prompt_tokens 3 + completion_tokens 1",
        ),
    ],
)
def test_missing_part_of_a_response_is_named(change: dict[str, Any], problem: str) -> None:
    assert structure_problem({**RESPONSE, **change}) == problem


def test_streamed_text_that_differs_is_shown_from_its_first_difference() -> None:
    assert same_text_row("abc", "abX", is_random=True).status is CheckStatus.SKIP
    assert same_text_row("abc", "", is_random=True).status is CheckStatus.FAIL
    assert same_text_row("abc", "abc", is_random=False).status is CheckStatus.PASS
    assert same_text_row("abcd", "abXd", is_random=False).evidence == "differs at character 2: 'cd' and, streamed, 'Xd'"
    assert same_text_row("abc", "ab", is_random=False).evidence == "differs at character 2: 'c' and, streamed, ''"


def test_load_has_the_flags_of_the_documented_command() -> None:
    words = load_command("aiperf", "m", "http://h:1", 16, 256, None, None)
    assert words[:2] == ["aiperf", "profile"]
    pairs = dict(itertools.pairwise(words))
    assert (pairs["--concurrency"], pairs["--request-count"], pairs["--warmup-request-count"]) == ("16", "256", "8")
    assert (pairs["--synthetic-input-tokens-mean"], pairs["--output-tokens-mean"]) == ("512", "128")
    assert "--artifact-dir" not in words
    assert load_command("aiperf", "m", "u", 1, 1, Path("a"), "t")[-6:] == [
        *("--tokenizer", "t", "--artifact-dir", "a", "--ui", "none")
    ]


def test_load_passes_only_if_all_requests_are_completed() -> None:
    good = {
        "request_count": {"avg": 4},
        "output_token_throughput": {"avg": 123.456},
        "time_to_first_token": {"p50": 8.0},
        "error_summary": [],
    }
    assert load_row(good, 4).evidence == "4 requests, 123.5 output tokens/s, 8 ms to the first token (p50)"
    assert load_row(good, 5).evidence == "4 of 5 requests were completed"
    wrong = {"request_count": {"avg": 3}, "error_summary": [{"error_details": {"message": "HTTP 503"}, "count": 1}]}
    assert load_row(wrong, 4).evidence == "1 of 4 requests failed: HTTP 503"


@pytest.mark.parametrize(
    ("status", "text", "evidence"),
    [
        (0, "", "GET :8081/metrics: no response"),
        (404, "", "GET :8081/metrics: status 404"),
        (200, "other 1\n", "GET :8081/metrics: no sample of dynamo_x"),
        (200, '# HELP dynamo_x\ndynamo_x{a="1"} 1\n', "GET :8081/metrics: 1 samples of dynamo_x"),
    ],
)
def test_metrics_are_those_of_the_component(status: int, text: str, evidence: str) -> None:
    assert metrics_row("worker metrics", 8081, status, text, "dynamo_x").evidence == evidence


def test_evidence_of_a_run_names_its_first_failure() -> None:
    rows = [passed("checkout", "main 1a2b"), failed("readiness", "Killed", "read serve.log")]
    found = evidence_of(rows, {"readiness": "FAIL: Killed"}, "ok\nKilled\n", {"ref": "main 1a2b"}, "mocker demo")
    assert found["verdict"] == "Request changes"
    assert found["summary"] == "mocker demo at main 1a2b: 2 checks, 1 failed (readiness: Killed)."
    assert found["log"] == "Killed"
    assert evidence_of(rows[:1], {}, "", {}, "x")["verdict"] == "Comment"
