"""The command line: ours, vLLM's, and neither."""

import argparse
from typing import Any

import pytest
from tests.unit.vllm.conftest import library as scripted_library
from tests.unit.vllm.scripted import AsyncEngineArgs, AsyncLLM

from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.errors import ConfigError
from dynamo.vllm import library
from dynamo.vllm.__main__ import main
from dynamo.vllm.config import read_command_line, read_engine_args


class Args(AsyncEngineArgs):
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--model", default="m")
        parser.add_argument("--max-num-seqs", type=int)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        return args


def read(*rest: str) -> Any:
    from dataclasses import replace

    given = replace(
        scripted_library(AsyncLLM(None)), AsyncEngineArgs=Args, FlexibleArgumentParser=argparse.ArgumentParser
    )
    return read_engine_args(given, rest)


def test_unknown_flags_are_passed_to_vllm() -> None:
    argv = ["--model", "x", "--disaggregation-mode", "prefill", "--max-num-seqs=3", "--namespace", "n"]
    config, rest = read_command_line(argv)
    assert (config.role, config.namespace) == (DisaggregationMode.PREFILL, "n")
    assert rest == ["--model", "x", "--max-num-seqs=3"]
    assert read(*rest).max_num_seqs == 3


def test_flag_unknown_to_vllm_is_refused_with_its_message() -> None:
    with pytest.raises(ConfigError, match="unrecognized arguments: --odd"):
        read("--odd")


@pytest.mark.parametrize(
    "argv",
    [
        ["--disaggregation-mode", "encode"],
        ["--embedding-worker", "--disaggregation-mode", "decode"],
        ["--benchmark-mode", "prefill"],
        ["--realtime"],
    ],
)
def test_unsupported_flag_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_command_line(argv)


def test_missing_vllm_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        main(["--help"])
