import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.profiler.thorough.aiperf import EXPORT, AiperfLoad, exported, sampled
from dynamo.profiler.thorough.deployment import RunningDeployment


def load(tmp_path: Path) -> AiperfLoad:
    stream: Any = None  # A command line does not use it.
    return AiperfLoad(RunningDeployment(stream, "http://h:1", "m", 0, 0), "/venv/aiperf", "/model", tmp_path)


def test_command_line_is_that_of_the_released_profiler(tmp_path: Path) -> None:
    words = load(tmp_path).arguments(tmp_path / "a", 3000, 5, 1, 100)
    assert words[:2] == ["/venv/aiperf", "profile"]
    pairs = list(itertools.pairwise(words))
    for pair in (
        ("--model", "m"), ("--tokenizer", "/model"), ("--endpoint-type", "chat"), ("--endpoint", "/v1/chat/completions"),
        ("--url", "http://h:1"), ("--extra-inputs", "ignore_eos:true"), ("--extra-inputs", "max_tokens:5"),
        ("--extra-inputs", "min_tokens:5"), ("--synthetic-input-tokens-mean", "3000"), ("--concurrency", "1"),
        ("--synthetic-input-tokens-stddev", "0"), ("--request-count", "1"), ("--warmup-request-count", "3"),
        ("--request-timeout-seconds", "1800"), ("--artifact-dir", str(tmp_path / "a")),
    ):  # fmt: skip
        assert pair in pairs
    assert "--streaming" in words


def test_latencies_are_read_from_the_export(tmp_path: Path) -> None:
    value = {
        "request_count": {"avg": 4.0},
        "time_to_first_token": {"avg": 50.0, "max": 80.0},
        "inter_token_latency": {"avg": 10.0},
    }
    (tmp_path / EXPORT).write_text(json.dumps(value))
    found = sampled(exported(tmp_path / EXPORT, "aiperf"))
    assert (found.answered, found.ttft_ms, found.last_ttft_ms, found.itl_ms) == (4, 50, 80, 10)


def test_run_without_answers_is_an_empty_sample() -> None:
    assert sampled({"request_count": None}).answered == 0


@pytest.mark.parametrize("text", [None, "{"])
def test_missing_export_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / EXPORT).write_text(text)
    with pytest.raises(ConfigError, match="--aiperf /x: cannot read"):
        exported(tmp_path / EXPORT, "/x")
