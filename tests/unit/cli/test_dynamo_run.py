"""`dynamo-run`: the former command line as today's commands."""

from pathlib import Path

import pytest

from dynamo.cli.dynamo_run import parse, read_prompts, run
from dynamo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "serve"),
    [
        ("in=http out=mocker m --http-port 80", ["m", "--engine", "mocker", "--http-port", "80"]),
        ("in=text out=echo_core m", ["m", "--engine", "mocker"]),
        ("in=http out=mistralrs m", ["m", "--engine", "cpu"]),
        (
            "in=http out=vllm m --tensor-parallel-size 2 --router-mode kv --verbose",
            ["m", "--engine", "vllm", "--router-mode", "kv", "--verbose", "--", "--tensor-parallel-size", "2"],
        ),
        ("out=cpu in=http --model-path d", ["--engine", "cpu", "--model-path", "d"]),
    ],
)
def test_engine_and_flags_reach_dynamo_serve(line: str, serve: list[str]) -> None:
    assert parse(line.split()).serve == serve


def test_endpoint_is_a_worker_and_auto_is_a_frontend() -> None:
    worker = parse(["in=dyn://a.b.c", "out=vllm", "m", "--x"]).process
    assert worker == ["-m", "dynamo.vllm", "--endpoint", "dyn://a.b.c", "--model", "m", "--x"]
    assert parse(["in=http", "out=auto", "--http-port", "1"]).process == ["-m", "dynamo.frontend", "--http-port", "1"]
    assert parse(["in=http", "out=dyn://a.b.c"]).target == "auto"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("in=dyn://a.b out=cpu", "in=dyn://a.b: expected dyn://NAMESPACE.COMPONENT.ENDPOINT"),
        ("in=dyn://a.b.c out=dyn", "in=dyn://a.b.c out=dyn: a worker needs an engine"),
        ("in=http out=auto m", "out=auto m: the workers have models of their own"),
        ("in=ftp out=cpu", "in=ftp: must be http, text, stdin, batch:FILE or dyn://"),
        ("in=http out=other", "out=other: must be cpu, mocker, vllm"),
    ],
)
def test_invalid_dynamo_run_arguments_are_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(line.split())


def test_defaults_are_a_chat_with_the_embedded_engine() -> None:
    command = parse(["m"])
    assert (command.source, command.target, command.model) == ("text", "cpu", "m")


def test_batch_file_is_read_before_a_server_starts(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with pytest.raises(ConfigError, match=r"in=batch:\S+in.jsonl: No such file or directory"):
        run([f"in=batch:{path}", "out=cpu"])
    path.write_text('{"text": "a"}\n\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match="line 3: expected a JSON object with a field text"):
        run([f"in=batch:{path}", "out=cpu"])
    path.write_text('{"text": "a"}\n\n{"text": 3}\n')
    assert read_prompts(path) == ["a", "3"]


def test_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "in=batch:FILE" in capsys.readouterr().out
