"""Claims of a review: failures in a log, structure and equality of responses, load and metrics, as rows and evidence. Pure."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.ops.report import CheckRow, CheckStatus, failed, passed, skipped

FAILURES = re.compile(r"Traceback|exited with code|CUDA out of memory|Unable to create lease|Killed|nvcc fatal")
"""Lines of a log that end the wait for readiness."""
NOISE = re.compile(r'"GET / HTTP|Ignore import error')
"""Lines that are known and harmless."""
WARMUP, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 512, 128
SHOWN_CHARS = 60


def failure_lines(log: str) -> list[str]:
    """Return the lines of a log that show a failure, without known noise."""
    return [line.strip() for line in log.splitlines() if FAILURES.search(line) and not NOISE.search(line)]


def structure_problem(response: Mapping[str, Any]) -> str:
    """Return what a chat completion lacks of the OpenAI API's structure; empty if nothing."""
    for name, kind in (
        ("id", str),
        ("object", str),
        ("created", int),
        ("model", str),
        ("choices", list),
        ("usage", dict),
    ):
        if not isinstance(response.get(name), kind):
            return f"field {name!r}: expected {kind.__name__}, got {type(response.get(name)).__name__}"
    if response["object"] != "chat.completion":
        return f"field 'object': expected 'chat.completion', got {response['object']!r}"
    if not response["choices"]:
        return "field 'choices': empty"
    choice = response["choices"][0]
    if (choice.get("message") or {}).get("role") != "assistant":
        return f"choices[0].message.role: expected 'assistant', got {(choice.get('message') or {}).get('role')!r}"
    if choice.get("finish_reason") is None:
        return "choices[0].finish_reason: missing"
    counts = [response["usage"].get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    if not all(isinstance(one, int) for one in counts) or counts[0] + counts[1] != counts[2]:
        return f"usage: total_tokens {counts[2]} is not prompt_tokens {counts[0]} + completion_tokens {counts[1]}"
    return ""


def same_text_row(whole: str, streamed: str, *, is_random: bool) -> CheckRow:
    """Return whether one greedy request has the same text streamed and not; a simulated engine's tokens are random."""
    if is_random and whole and streamed:
        return skipped("streaming", f"{len(streamed)} characters; this engine's tokens are random")
    if whole == streamed:
        return passed("streaming", f"{len(streamed)} characters, equal to the response that is not streamed")
    at = next((at for at, (one, other) in enumerate(zip(whole, streamed, strict=False)) if one != other), None)
    at = min(len(whole), len(streamed)) if at is None else at
    shown = [repr(text[at : at + SHOWN_CHARS]) for text in (whole, streamed)]
    return failed("streaming", f"differs at character {at}: {shown[0]} and, streamed, {shown[1]}", "repeat it by hand")


def load_command(
    program: str, model: str, url: str, concurrency: int, requests: int, artifacts: Path | None, tokenizer: str | None
) -> list[str]:
    """Return the command line of aiperf for one load."""
    words = [
        *(program, "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming"),
        *("--concurrency", str(concurrency), "--request-count", str(requests), "--warmup-request-count", str(WARMUP)),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS)),
    ]
    words += [] if tokenizer is None else ["--tokenizer", tokenizer]
    return words if artifacts is None else [*words, "--artifact-dir", str(artifacts), "--ui", "none"]


def load_row(measured: Mapping[str, Any], requests: int) -> CheckRow:
    """Return the result of one load from aiperf's own report."""
    errors: Sequence[Mapping[str, Any]] = measured.get("error_summary") or ()
    done = (measured.get("request_count") or {}).get("avg") or 0
    if errors:
        details = errors[0].get("error_details") or {}
        text = details.get("message") or details.get("type") or str(errors[0])
        return failed("load", f"{requests - int(done)} of {requests} requests failed: {text}", "read serve.log")
    if done != requests or measured.get("was_cancelled"):
        return failed("load", f"{int(done)} of {requests} requests were completed", "read serve.log")
    return passed("load", load_summary(measured))


def load_summary(measured: Mapping[str, Any]) -> str:
    """Return requests, throughput and latencies of one load."""
    parts = []
    for name, statistic, label in (
        ("request_count", "avg", "requests"),
        ("output_token_throughput", "avg", "output tokens/s"),
        ("time_to_first_token", "p50", "ms to the first token (p50)"),
        ("inter_token_latency", "p50", "ms between tokens (p50)"),
    ):
        value = (measured.get(name) or {}).get(statistic)
        if isinstance(value, int | float):
            parts.append(f"{value:.4g} {label}")
    return ", ".join(parts)


def metrics_row(name: str, port: int, status: int, text: str, family: str) -> CheckRow:
    """Return whether a port serves the metrics of a component."""
    if status != 200:
        return failed(name, f"GET :{port}/metrics: {f'status {status}' if status else 'no response'}", "read serve.log")
    samples = sum(line.startswith(family) for line in text.splitlines())
    if not samples:
        return failed(name, f"GET :{port}/metrics: no sample of {family}", "compare with docs/reference/metrics.md")
    return passed(name, f"GET :{port}/metrics: {samples} samples of {family}")


def evidence_of(
    rows: Sequence[CheckRow], tests: Mapping[str, str], log: str, environment: Mapping[str, str], subject: str
) -> dict[str, Any]:
    """Return the evidence of a run for the draft."""
    failures = [row for row in rows if row.status is CheckStatus.FAIL]
    where = environment.get("ref", "an unknown commit")
    outcome = f"{failures[0].check}: {failures[0].evidence}" if failures else "no check failed"
    return {
        "title": subject,
        "verdict": "Request changes" if failures else "Comment",
        "summary": f"{subject} at {where}: {len(rows)} checks, {len(failures)} failed ({outcome}).",
        "tests": dict(tests),
        "log": "\n".join(failure_lines(log)),
        "environment": dict(environment),
    }
