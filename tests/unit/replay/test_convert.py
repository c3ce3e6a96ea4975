"""Convert: rows of others."""

import gzip
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.convert import main
from dynamo.replay.trace import read

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.0319600,1200,109
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
118.5,GPT-4,417,276,693,Conversation log
"""


def test_azure_timestamps_are_relative_to_the_first_request(tmp_path: Path) -> None:
    source, target = tmp_path / "a.csv", tmp_path / "a.jsonl"
    source.write_text(AZURE)
    assert main(["--from=azure", f"--input-file={source}", f"--output-file={target}"]) == 0
    first, second = (session.turns[0] for session in read([str(target)]))
    assert (first.at_ms, second.at_ms) == (0, 52)
    assert (second.input_tokens, second.output_tokens, len(second.hash_ids)) == (1200, 109, 3)
    assert not set(first.hash_ids) & set(second.hash_ids)


def test_failed_burstgpt_requests_are_omitted(tmp_path: Path) -> None:
    source, target = tmp_path / "b.csv.gz", tmp_path / "b.jsonl"
    source.write_bytes(gzip.compress(BURSTGPT.encode()))
    assert main(["--from=burstgpt", f"--input-file={source}", f"--output-file={target}"]) == 0
    assert [session.turns[0].at_ms for session in read([str(target)])] == [0, 113_500]


@pytest.mark.parametrize("text", ["Timestamp\n1\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n"])
def test_file_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    source = tmp_path / "x.csv"
    source.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.csv:2: "):
        main([f"--input-file={source}"])


def test_missing_input_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv"):
        main(["--input-file=nowhere.csv"])


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "many", "", "1e99"])
def test_invalid_number_of_tokens_is_named_with_what_is_allowed(tmp_path: Path, value: str) -> None:
    source = tmp_path / "a.csv"
    source.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,5\n1,{value},5\n")
    with pytest.raises(
        ConfigError, match=rf"a\.csv:3: ContextTokens is '{value}': must be a number from 0 to 100000000"
    ):
        main([f"--input-file={source}"])
