"""Datagen: analysis, and traces that are like the one they were learned from."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.datagen import SynthesizeConfig, analysis, learned, main, synthesized, turns_of
from dynamo.replay.load import Turn


def turn(number: int, *ids: int, tokens: int | None = None) -> Turn:
    return Turn(f"r{number}", tokens or len(ids) * 64, 10 + number, ids, 100.0 * number)


TURNS = [turn(n, 1, 2, 3 if n % 2 else 4, 100 + n, 200 + n) for n in range(40)]


def test_cache_hit_requires_a_leading_block_seen_before() -> None:
    found = analysis([turn(0, 1, 2), turn(1, 1, 3), turn(2, 9, 2)], 64)
    assert found["theoretical_hit_rate"] == pytest.approx(1 / 6)
    assert found["unique_blocks"] == 5
    assert found["context_length"]["max"] == 64


def test_synthesized_trace_has_the_statistics_of_its_source() -> None:
    rows = synthesized(learned(TURNS, 64), SynthesizeConfig(num_requests=2000, block_size=64))
    made = [
        Turn(str(at), row["input_length"], row["output_length"], row["hash_ids"], row["timestamp"])
        for at, row in enumerate(rows)
    ]
    before, after = analysis(TURNS, 64), analysis(made, 64)
    assert after["input_length"]["avg"] == pytest.approx(before["input_length"]["avg"], rel=0.02)
    assert after["output_length"]["avg"] == pytest.approx(before["output_length"]["avg"], rel=0.05)
    assert after["context_length"]["avg"] == pytest.approx(before["context_length"]["avg"], rel=0.02)
    assert made[-1].at_ms == pytest.approx(2000 * 100, rel=0.01)


def test_multipliers_scale_prefix_and_prompt_lengths() -> None:
    def lengths(**given: float) -> tuple[float, float]:
        config = SynthesizeConfig(num_requests=500, block_size=64, **given)  # type: ignore[arg-type]
        rows = synthesized(learned(TURNS, 64), config)
        found = analysis([Turn("", row["input_length"], 1, row["hash_ids"], 0.0) for row in rows], 64)
        return found["context_length"]["avg"], found["unique_prompt_length"]["avg"]

    assert lengths() == (192, 128)
    assert lengths(prefix_len_multiplier=2) == (384, 128)
    assert lengths(prompt_len_multiplier=3) == (192, 384)


def test_prefix_root_multiplier_creates_disjoint_copies_of_the_prefix_tree() -> None:
    rows = synthesized(learned(TURNS, 64), SynthesizeConfig(num_requests=300, block_size=64, prefix_root_multiplier=3))
    assert len({row["hash_ids"][0] for row in rows}) == 3


def test_synthesized_prompts_respect_max_isl() -> None:
    turns = [turn(n, 1, 2, 50 + n, tokens=192) for n in range(9)] + [turn(n, 1, *range(90, 99)) for n in range(9, 18)]
    rows = synthesized(learned(turns, 64), SynthesizeConfig(num_requests=50, block_size=64, max_isl=400))
    assert max(row["input_length"] for row in rows) <= 400


def test_datagen_commands_read_and_write_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, made = tmp_path / "t.jsonl", tmp_path / "m.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": one.at_ms, "input_length": 320, "output_length": 5, "hash_ids": one.hash_ids})
            + "\n"
            for one in TURNS
        )
    )
    flags = [f"--input-file={trace}", "--block-size=64"]
    assert main(["synthesize", *flags, "--num-requests=70", f"--output-file={made}"]) == 0
    assert len(turns_of(str(made), 64)) == 70
    assert main(["analyze", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 40


@pytest.mark.parametrize("flags", [["guess"], ["analyze"], ["synthesize", "--input-file=x", "--speedup-ratio=0"]])
def test_invalid_datagen_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(flags)
