"""Argparse groups of routers, frontends and workers."""

import argparse

import pytest

from dynamo.common.configuration.groups.kv_router_args import LOAD_AWARE
from dynamo.common.configuration.groups.router_args import build_router_config, parse_worker_router_config
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.configuration.utils import env_or_default, parse_bool
from dynamo.frontend.frontend_args import FrontendArgGroup, FrontendConfig
from dynamo.llm import RouterMode
from dynamo.router.args import parse_args


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_NAMESPACE", "DYN_NAMESPACE_WORKER_SUFFIX", "DYN_HTTP_PORT"):
        monkeypatch.delenv(name, raising=False)


def frontend(*argv: str) -> FrontendConfig:
    parser = argparse.ArgumentParser()
    FrontendArgGroup().add_arguments(parser)
    config = FrontendConfig.from_cli_args(parser.parse_args(argv))
    config.validate()
    return config


def test_router_endpoint_follows_the_namespace_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_NAMESPACE", "prod")
    monkeypatch.setenv("DYN_NAMESPACE_WORKER_SUFFIX", "b")
    config = parse_args(["--endpoint", "dynamo.backend.generate"])
    assert (config.namespace, config.endpoint, config.router_block_size) == ("prod", "prod-b.backend.generate", 128)


@pytest.mark.parametrize("argv", [[], ["--endpoint", "a.b"], ["--endpoint", "a.b.c", "--router-conditional-disagg"]])
def test_router_refuses_incomplete_or_contradicting_flags(argv: list[str]) -> None:
    with pytest.raises(ValueError):
        parse_args(argv)


def test_frontend_flag_takes_precedence_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_HTTP_PORT", "9000")
    assert frontend().http_port == 9000
    assert frontend("--http-port", "9001").http_port == 9001


def test_load_aware_sets_its_preset_and_warns() -> None:
    with pytest.warns(FutureWarning, match="--load-aware is deprecated"):
        config = frontend("--load-aware")
    assert config.router_mode == "kv"
    assert {name: getattr(config, name) for name in LOAD_AWARE} == LOAD_AWARE


def test_busy_limit_none_disables_and_out_of_range_is_refused() -> None:
    assert frontend("--active-decode-blocks-threshold", "None").active_decode_blocks_threshold is None
    with pytest.raises(ValueError, match="between 0 and 1"):
        frontend("--active-decode-blocks-threshold", "1.5")


def test_worker_router_flags_become_a_router_config_and_the_rest_is_returned() -> None:
    config, rest = parse_worker_router_config(["--model", "m", "--router-mode", "kv", "--router-ttl-secs", "9"])
    built = build_router_config(config)
    assert rest == ["--model", "m"]
    assert built is not None
    assert built.router_mode == RouterMode.KV
    assert build_router_config(parse_worker_router_config([])[0]) is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ("always", "auto")),
        (["--dyn-structural-tag", "false"], None),
        (["--dyn-structural-tag", '{"scope": "auto"}'], ("auto", "auto")),
        (["--dyn-structural-tag-schema", "strict"], ("always", "strict")),
    ],
)
def test_structural_tag_of_workers(argv: list[str], expected: tuple[str, str] | None) -> None:
    parser = argparse.ArgumentParser()
    DynamoRuntimeArgGroup().add_arguments(parser)
    config = DynamoRuntimeConfig.from_cli_args(parser.parse_args(argv))
    config.validate()
    tag = config.structural_tag
    assert (None if tag is None else (tag["scope"], tag["schema"])) == expected


def test_values_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LIST", "a b")
    assert env_or_default("DYN_LIST", []) == ["a", "b"]
    assert env_or_default("DYN_ABSENT", 3) == 3
    assert parse_bool(" ON ") is True
    with pytest.raises(argparse.ArgumentTypeError):
        parse_bool("maybe")
