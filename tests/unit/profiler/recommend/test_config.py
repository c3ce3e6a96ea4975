import json
from pathlib import Path

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.profiler.recommend.config import RecommendConfig

BASE = ["Qwen/Qwen3-8B", "--gpu", "h100_sxm"]


def config(*more: str) -> RecommendConfig:
    return load(RecommendConfig, [*BASE, *more], {})


def test_generated_load_has_the_given_lengths_and_number() -> None:
    sessions = config("--request-rate", "5", "--requests", "10", "--isl", "700", "--osl", "90").load()
    assert len(sessions) == 10
    assert {(one.turns[0].input_tokens, one.turns[0].output_tokens) for one in sessions} == {(700, 90)}


def test_equal_seeds_give_equal_loads() -> None:
    one, two = (config("--request-rate", "5", "--requests", "10").load() for _ in range(2))
    assert one == two


def test_trace_is_read_up_to_the_limit(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]} for at in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(config("--trace", str(tmp_path / "a.jsonl"), "--requests", "4").load()) == 4


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "model is missing"),
        (["m"], "--gpu: missing"),
        (BASE, "--request-rate: missing"),
        ([*BASE, "--request-rate", "1", "--trace", "a"], "not allowed with --trace"),
        ([*BASE, "--request-rate", "1", "--gpus", "0"], "--gpus 0: must be more than 0"),
        ([*BASE, "--request-rate", "1", "--ttft", "-1"], "--ttft -1: must be more than 0"),
        ([*BASE, "--request-rate", "1", "--sla-share", "2"], "--sla-share 2: must be from 0 to 1"),
    ],
)
def test_wrong_command_lines_are_refused(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(RecommendConfig, argv, {})


def test_absent_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--trace none\.jsonl: no such file"):
        config("--trace", "none.jsonl").load()
