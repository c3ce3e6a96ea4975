"""Worker options have upstream's names and set the endpoint and the model of a worker."""

import json
from pathlib import Path

import pytest

from dynamo.backend.config import DisaggregatedOptions, WorkerOptions, grace_period_s, request_queue_limit
from dynamo.core.config import dump, load
from dynamo.core.errors import ConfigError
from dynamo.model_card.tool_call_tags import TagPolicy


def read(*argv: str, **variables: str) -> WorkerOptions:
    return load(WorkerOptions, argv, variables, "worker")


def test_worker_serves_the_backend_component_of_its_namespace() -> None:
    assert str(read().endpoint_id()) == "dynamo.backend.generate"
    assert str(read(DYN_NAMESPACE="blue").endpoint_id()) == "blue.backend.generate"


def test_namespace_suffix_separates_workers_of_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_NAMESPACE_WORKER_SUFFIX", "v2")
    assert str(read().endpoint_id()) == "dynamo-v2.backend.generate"
    assert str(read("--endpoint=dyn://a.b.c").endpoint_id()) == "a.b.c"


def test_endpoint_requires_three_parts() -> None:
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
def test_invalid_value_is_refused_by_flag_name(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument.split("=")[0]):
        read(argument)


def test_deprecated_structural_tag_flags_set_the_structural_tag_options() -> None:
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
def test_deprecated_flags_that_contradict_structural_tags_are_refused_by_name(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with --"):
        read(*arguments)


def test_structural_tags_are_off_by_default() -> None:
    assert read().tag_policy() is None
    assert read("--dyn-structural-tag=false").tag_policy() is None
    assert read("--dyn-structural-tag=true").tag_policy() == TagPolicy("always")
    assert read(DYN_STRUCTURAL_TAG='{"scope": "auto"}').tag_policy() == TagPolicy("auto")


def test_configuration_is_dumped_as_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    dump(read("--namespace=blue"), str(path))
    assert json.loads(path.read_text())["config"]["namespace"] == "blue"


@pytest.mark.parametrize(("text", "seconds"), [("", 5.0), ("2.5", 2.5), ("-3", 0.0), ("soon", 5.0)])
def test_invalid_grace_period_defaults_to_five_seconds(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", text)
    assert grace_period_s() == seconds


def test_request_queue_limit_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", raising=False)
    assert request_queue_limit() == 16
    monkeypatch.setenv("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", "-1")
    with pytest.raises(ConfigError, match="DYN_DYNAMO_REQUEST_QUEUE_LIMIT"):
        request_queue_limit()


@pytest.mark.parametrize("flag", ["--dyn-tool-call-parser", "--dyn-reasoning-parser"])
def test_unknown_parser_is_refused_with_a_list_of_valid_names(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} unknown: must be one of .*qwen3"):
        load(WorkerOptions, [flag, "unknown"])


def test_default_thinking_mode_is_read_from_its_flag() -> None:
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
def test_each_worker_role_has_its_default_component(argv: tuple[str, ...], endpoint: str) -> None:
    assert str(role_options(*argv).endpoint_id()).endswith(endpoint)


def test_contradictory_role_flags_are_refused() -> None:
    with pytest.raises(ConfigError, match="--disaggregation-mode"):
        role_options("--disaggregation-mode=agg", "--is-prefill-worker")
    with pytest.raises(ConfigError, match="agg"):
        role_options("--disaggregation-mode=both")
