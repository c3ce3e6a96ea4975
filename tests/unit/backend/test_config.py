"""Worker options have upstream's names and say where and what a worker serves."""

import json
from pathlib import Path

import pytest

from dynamo.backend.config import DisaggregatedOptions, WorkerOptions, grace_period_s, request_queue_limit
from dynamo.core.config import dump, load
from dynamo.core.errors import ConfigError
from dynamo.model_card.tool_call_tags import TagPolicy


def read(*argv: str, **variables: str) -> WorkerOptions:
    return load(WorkerOptions, argv, variables, "worker")


def test_a_worker_serves_the_backend_of_its_namespace() -> None:
    assert str(read().endpoint_id()) == "dynamo.backend.generate"
    assert str(read(DYN_NAMESPACE="blue").endpoint_id()) == "blue.backend.generate"


def test_the_suffix_keeps_the_workers_of_two_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_NAMESPACE_WORKER_SUFFIX", "v2")
    assert str(read().endpoint_id()) == "dynamo-v2.backend.generate"
    assert str(read("--endpoint=dyn://a.b.c").endpoint_id()) == "a.b.c"


def test_an_endpoint_has_three_parts() -> None:
    with pytest.raises(ConfigError, match="--endpoint"):
        read("--endpoint=a.b")
    with pytest.raises(ConfigError, match="--namespace"):
        read("--namespace=a.b")


def test_model_type_follows_the_endpoint_types() -> None:
    assert read().model_type() == "Chat | Completions"
    assert read("--endpoint-types=completions").model_type() == "Completions"
    assert read("--dyn-endpoint-types=chat").model_type() == "Chat"
    assert read("--endpoint-types=none").model_type() == ""
    with pytest.raises(ConfigError, match="embeddings"):
        read("--endpoint-types=chat,embeddings")


@pytest.mark.parametrize(
    "argument", ["--engine-request-limit=0", "--custom-jinja-template=/nowhere.jinja", "--dyn-structural-tag=x"]
)
def test_a_value_that_cannot_be_is_refused_by_name(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument.split("=")[0]):
        read(argument)


def test_former_flags_of_structural_tags_are_its_parts() -> None:
    assert read("--dyn-enable-structural-tag").tag_policy() == TagPolicy("always")
    assert read("--dyn-structural-tag-scope=auto").tag_policy() == TagPolicy("auto")
    assert read("--dyn-structural-tag-schema=strict").tag_policy() == TagPolicy("always", "strict")
    assert read("--no-dyn-enable-structural-tag", "--dyn-structural-tag-scope=auto").tag_policy() is None
    assert read("--dyn-enable-structural-tag", "--dyn-structural-tag").tag_policy() == TagPolicy("always")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dyn-structural-tag=true", "--dyn-structural-tag-scope=auto"),
        ("--dyn-structural-tag=true", "--no-dyn-enable-structural-tag"),
        ("--dyn-structural-tag=false", "--dyn-enable-structural-tag"),
    ],
)
def test_former_flags_that_contradict_structural_tags_are_named(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with --"):
        read(*arguments)


def test_structural_tags_are_off_by_default() -> None:
    assert read().tag_policy() is None
    assert read("--dyn-structural-tag=false").tag_policy() is None
    assert read("--dyn-structural-tag=true").tag_policy() == TagPolicy("always")
    assert read(DYN_STRUCTURAL_TAG='{"scope": "auto"}').tag_policy() == TagPolicy("auto")


def test_the_configuration_can_be_written_down(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    dump(read("--namespace=blue"), str(path))
    assert json.loads(path.read_text())["config"]["namespace"] == "blue"


@pytest.mark.parametrize(("text", "seconds"), [("", 5.0), ("2.5", 2.5), ("-3", 0.0), ("soon", 5.0)])
def test_a_grace_period_that_cannot_be_read_is_five_seconds(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", text)
    assert grace_period_s() == seconds


def test_the_queue_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", raising=False)
    assert request_queue_limit() == 16
    monkeypatch.setenv("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", "-1")
    with pytest.raises(ConfigError, match="DYN_DYNAMO_REQUEST_QUEUE_LIMIT"):
        request_queue_limit()


@pytest.mark.parametrize("flag", ["--dyn-tool-call-parser", "--dyn-reasoning-parser"])
def test_a_parser_that_nobody_knows_is_refused_with_the_names(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} nobody: must be one of .*qwen3"):
        load(WorkerOptions, [flag, "nobody"])


def test_whether_a_model_thinks_is_one_of_two_words() -> None:
    assert load(WorkerOptions, ["--dyn-default-thinking-mode", "disabled"]).default_thinking_mode == "disabled"


# Roles.


def role_options(*argv: str) -> DisaggregatedOptions:
    return load(DisaggregatedOptions, argv, {})


@pytest.mark.parametrize(
    ("argv", "endpoint"),
    [
        ((), "dynamo.backend.generate"),
        (("--disaggregation-mode=prefill", "--namespace=n"), "n.prefill.generate"),
        (("--is-decode-worker",), "dynamo.backend.generate"),
        (("--disaggregation-mode=encode",), "dynamo.encode.generate"),
        (("--disaggregation-mode=prefill", "--endpoint=dyn://a.b.c"), "a.b.c"),
    ],
)
def test_each_role_has_a_component_of_its_own(argv: tuple[str, ...], endpoint: str) -> None:
    assert str(role_options(*argv).endpoint_id()).endswith(endpoint)


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="--disaggregation-mode"):
        role_options("--disaggregation-mode=agg", "--is-prefill-worker")
    with pytest.raises(ConfigError, match="agg"):
        role_options("--disaggregation-mode=both")
