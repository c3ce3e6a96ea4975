"""The frontend's command line."""

import json
from pathlib import Path

import pytest

from dynamo.api.responses.store import StoreLimits
from dynamo.core.config import dump
from dynamo.core.errors import ConfigError
from dynamo.core.unsupported_flags import UnsupportedFlag, declared_flags, drop_unsupported
from dynamo.frontend.config import UNSUPPORTED_FLAGS, FrontendConfig, api_keys, read


def test_frontend_defaults_equal_those_of_upstream() -> None:
    config = read([], {})
    assert (config.http_host, config.http_port, config.router_mode) == ("0.0.0.0", 8000, "round-robin")
    assert (config.http_workers, config.interactive, config.api_key) == (1, False, [])


def test_extensions_are_repeated_or_separated_by_spaces() -> None:
    assert read(["--frontend-route-extension", "a:b", "--frontend-route-extension", "c"], {}).extensions == ["a:b", "c"]
    assert read([], {"DYN_FRONTEND_ROUTE_EXTENSIONS": "a:b  c:d"}).extensions == ["a:b", "c:d"]


def test_flags_select_the_additional_apis() -> None:
    apis = read([], {}).apis
    assert (apis.enable_anthropic, apis.strip_anthropic_preamble, apis.responses_store) == (False, True, "memory")
    argv = ["--enable-anthropic-api", "--no-strip-anthropic-preamble", "--responses-store", "dir"]
    limits = ["--responses-store-entries", "5", "--responses-store-bytes", "6", "--responses-store-unused-s", "7.5"]
    apis = read([*argv, *limits], {}).apis
    assert (apis.enable_anthropic, apis.strip_anthropic_preamble, apis.responses_store) == (True, False, "dir")
    assert apis.responses_limits == StoreLimits(5, 6, 7.5)
    assert read([], {"DYN_ENABLE_ANTHROPIC_API": "1", "DYN_RESPONSES_STORE": "none"}).apis.responses_store == "none"


def test_api_keys_are_read_from_flag_and_variable_and_not_dumped(tmp_path: Path) -> None:
    config = read(["--api-key", "sk-secret-1"], {})
    found = api_keys(config, {"DYN_API_KEYS": "sk-secret-2, sk-secret-3"})
    assert found.keys == ("sk-secret-1", "sk-secret-2", "sk-secret-3")
    assert "sk-secret" not in repr(found)
    path = tmp_path / "config.json"
    dump(config.shown, str(path))
    assert "sk-secret" not in path.read_text()
    assert json.loads(path.read_text())["config"]["http_port"] == 8000


def test_frontend_api_keys_may_contain_commas() -> None:
    config = read(["--api-key", "sk-one,with,commas", "--api-key=sk-another-key"], {})
    assert api_keys(config, {}).keys == ("sk-one,with,commas", "sk-another-key")
    variables = {"DYN_API_KEYS": '["sk-json,key-1", "sk-json-key-2"]', "DYN_ADMIN_API_KEYS": "sk-admin-key"}
    found = api_keys(read([], {}), variables)
    assert (found.keys, found.admin_keys) == (("sk-json,key-1", "sk-json-key-2"), ("sk-admin-key",))
    assert api_keys(read([], {}), found.variables) == found, "a child process reads what its parent hands over"


@pytest.mark.parametrize(
    ("argv", "variables", "named"),
    [
        (["--api-key", ""], {}, "--api-key"),
        (["--api-key="], {}, "--api-key"),
        (["--api-key", "   "], {}, "--api-key"),
        (["--api-key", "sk-good-key", "--api-key", " "], {}, "--api-key"),
        (["--admin-api-key", ""], {}, "--admin-api-key"),
        (["--api-keys-file", ""], {}, "--api-keys-file"),
        (["--api-keys-file", " "], {}, "--api-keys-file"),
        (["--tls-client-ca-cert-path", ""], {}, "--tls-client-ca-cert-path"),
        (["--tcp-tls-client-ca-cert-path", ""], {}, "--tcp-tls-client-ca-cert-path"),
        ([], {"DYN_API_KEYS": ""}, "DYN_API_KEYS"),
        ([], {"DYN_API_KEYS": " "}, "DYN_API_KEYS"),
        ([], {"DYN_API_KEYS": ","}, "DYN_API_KEYS"),
        ([], {"DYN_API_KEYS": "[]"}, "DYN_API_KEYS"),
        ([], {"DYN_API_KEYS": "[1]"}, "DYN_API_KEYS"),
        ([], {"DYN_API_KEYS": "short"}, "DYN_API_KEYS"),
        ([], {"DYN_ADMIN_API_KEYS": ","}, "DYN_ADMIN_API_KEYS"),
        ([], {"DYN_API_KEYS_FILE": ""}, "DYN_API_KEYS_FILE"),
        ([], {"DYN_TLS_CLIENT_CA_CERT_PATH": " "}, "DYN_TLS_CLIENT_CA_CERT_PATH"),
    ],
)
def test_frontend_refuses_authentication_options_without_a_key(
    argv: list[str], variables: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        api_keys(read(argv, variables), variables)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--http-workers", "0"], "--http-workers 0"),
        (["--responses-store-entries", "0"], "--responses-store-entries"),
        (["--http-workers", "2", "--discovery-backend", "mem"], "--discovery-backend mem"),
        (["--http-workers", "2", "--interactive"], "--interactive"),
        (["--http-workers", "2", "--kserve-grpc-server"], "--kserve-grpc-server and --http-workers"),
        (["--batch-dir", "d", "--kserve-grpc-server"], "--kserve-grpc-server and --batch-dir"),
        (["--grpc-metrics-port", "70000"], "--grpc-metrics-port"),
        (["--batch-concurrency", "0"], "--batch-concurrency"),
        (["-i", "--frontend-route-extension", "a:b"], "--frontend-route-extension"),
        (["--cors-origins", "example.org"], "--cors-origins"),
        (["--http-port", "70000"], "--http-port"),
        (["--migration-limit", "-1"], "--migration-limit"),
        (["--tls-cert-path", "x"], "--tls-key-path"),
        (["--serve-indexer"], "--serve-indexer"),
        (["--htp-port", "1"], "did you mean --http-port"),
    ],
)
def test_invalid_command_line_is_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(argv, {})


def test_load_aware_flag_selects_the_kv_router_mode() -> None:
    assert read(["--load-aware"], {}).mode == "kv"
    assert read(["--router-mode", "random"], {}).mode == "random"


def test_session_affinity_and_minimum_worker_options_are_read_in_every_router_mode() -> None:
    assert read(["--router-mode", "kv", "--router-session-affinity-ttl-secs", "60"], {}).session_affinity_ttl_secs == 60
    assert read(["--router-session-affinity-ttl-secs", "60"], {}).session_affinity_ttl_secs == 60
    assert read(["--router-min-initial-workers", "3"], {}).min_initial_workers == 3
    with pytest.raises(ConfigError, match="--router-min-initial-workers -1"):
        read(["--router-min-initial-workers", "-1"], {})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shared-cache-type", "redis"], "--shared-cache-type"),
        (["--shared-cache-multiplier", "1.5"], "--shared-cache-multiplier"),
        (["--router-tracking-hash", "keyed-xxh3-v1"], "--router-tracking-key-file"),
        (["--router-prefill-load-model", "ais"], "--ais-backend"),
        (["--router-event-threads", "0"], "--router-event-threads"),
    ],
)
def test_contradictory_kv_router_options_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(argv, {})


def test_unreadable_key_or_policy_file_stops_the_start(tmp_path: Path) -> None:
    keyed = ["--router-tracking-hash", "keyed-xxh3-v1", "--router-tracking-key-id", "a", "--router-tracking-key-file"]
    with pytest.raises(ConfigError, match="cannot be read"):
        read([*keyed, str(tmp_path / "none")], {})
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "router: {router_tracking_hash: keyed-xxh3-v1, router_tracking_key_id: a, router_tracking_key_file: none}"
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        read(["--router-policy-config", str(policy)], {})


def test_every_kv_router_flag_is_supported(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    config = read(
        [
            *("--shared-cache-type", "hicache", "--shared-cache-multiplier", "0.25", "--enable-session-prefix-index"),
            *("--router-tracking-hash", "keyed-xxh3-v1", "--router-tracking-key-file", str(tmp_path / "key")),
            *("--router-tracking-key-id", "a", "--router-prefill-load-model", "aic", "--router-event-threads", "8"),
            *("--aic-backend", "vllm", "--ais-system", "h200_sxm", "--ais-model-path", "org/model"),
        ],
        {"DYN_AIS_TP_SIZE": "2"},
    )

    assert (config.shared_cache_type, config.router_tracking_hash, config.ais_tp_size) == (
        "hicache",
        "keyed-xxh3-v1",
        2,
    )


def test_serve_indexer_requires_a_local_kv_index() -> None:
    assert read(["--router-mode", "kv", "--serve-indexer"], {}).serve_indexer
    with pytest.raises(ConfigError, match="--serve-indexer: requires --router-mode kv"):
        read(["--serve-indexer"], {})
    with pytest.raises(ConfigError, match="mutually exclusive"):
        read(["--router-mode", "kv", "--serve-indexer", "--use-remote-indexer"], {})


def kept(*argv: str, **variables: str) -> list[str]:
    return drop_unsupported(UNSUPPORTED_FLAGS, argv, variables, {"--http-port"})


@pytest.mark.parametrize("argv", [["--dyn-chat-processor", "vllm"], ["--exclude-tools-when-tool-choice-none=false"]])
def test_unsupported_flag_is_refused_by_name(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=argv[0].partition("=")[0]):
        kept(*argv)


def test_variable_of_an_unsupported_flag_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="DYN_CHAT_PROCESSOR=vllm: --dyn-chat-processor"):
        kept(DYN_CHAT_PROCESSOR="vllm")


def test_unsupported_flags_with_their_default_are_dropped() -> None:
    argv = [
        "--http-port",
        "1",
        "--exclude-tools-when-tool-choice-none",
        "--dyn-chat-processor=dynamo",
        "--x",
    ]
    assert kept(*argv, DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE="true", DYN_CHAT_PROCESSOR="dynamo") == [
        "--http-port",
        "1",
        "--x",
    ]


def test_declared_flag_is_supported_even_if_listed() -> None:
    assert drop_unsupported(UNSUPPORTED_FLAGS, ["--dyn-chat-processor=x"], {}, {"--dyn-chat-processor"}) == [
        "--dyn-chat-processor=x"
    ]


def test_only_the_unsupported_flag_with_another_value_is_named() -> None:
    with pytest.raises(ConfigError, match="--dyn-chat-processor"):
        kept("--exclude-tools-when-tool-choice-none", "--dyn-chat-processor", "other")


@pytest.mark.parametrize(
    "one",
    [one for one in UNSUPPORTED_FLAGS if one.flag not in declared_flags(FrontendConfig)],
    ids=lambda one: one.flag,
)
def test_unsupported_flag_is_refused_unless_it_has_its_default_value(one: UnsupportedFlag) -> None:
    with pytest.raises(ConfigError, match=one.flag):
        kept(f"{one.flag}={not one.default if isinstance(one.default, bool) else 'otherwise'}")
    assert kept(f"{one.flag}={one.default}") == []


def test_flags_without_an_effect_in_upstream_are_accepted() -> None:
    config = read(
        [
            "--kv-cache-block-size", "16", "--admission-control", "token-capacity", "--dyn-debug-perf",
            "--dyn-preprocess-workers", "2", "--trust-remote-code",
        ],
        {},
    )  # fmt: skip
    assert config.kv_cache_block_size == 16
    assert config.trust_remote_code


def test_busy_thresholds_accept_none() -> None:
    config = read(["--active-decode-blocks-threshold", "None"], {"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "none"})
    assert not config.thresholds.is_set
    argv = ["--active-decode-blocks-threshold", "None"]
    assert read(argv, {"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.5"}).active_decode_blocks_threshold is None
    with pytest.raises(ConfigError, match="'x': expected a number, or None"):
        read(["--active-decode-blocks-threshold", "x"], {})
