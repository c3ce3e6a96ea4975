"""ProxyConfig: valid combinations, and addresses of requests."""

from typing import Any

import pytest

from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS
from dynamo.core.errors import ConfigError
from dynamo.core.unsupported_flags import load
from dynamo.cpu.config import DEMO_MODEL
from dynamo.openai_proxy.config import ProxyConfig


@pytest.mark.parametrize(
    ("url", "api_path", "base", "models"),
    [
        ("http://h:1", "/v1", "http://h:1", "/v1/models"),
        ("http://h:1/v1", "/v1", "http://h:1", "/v1/models"),
        ("http://h:1/v1/", "/v1", "http://h:1", "/v1/models"),
        ("https://h/api/v1", "/v1", "https://h/api", "/v1/models"),
        ("https://h/v1beta/openai", "", "https://h/v1beta/openai", "/models"),
    ],
)
def test_api_path_is_resolved_below_the_url(url: str, api_path: str, base: str, models: str) -> None:
    config = ProxyConfig(url=url, api_path=api_path)
    assert (config.base_url, config.api("/models")) == (base, models)


def test_tokens_are_sent_when_the_model_path_has_a_tokenizer() -> None:
    assert ProxyConfig(url="h").takes_text
    assert not ProxyConfig(url="h", model_path=DEMO_MODEL).takes_text
    assert ProxyConfig(url="h", model_path=DEMO_MODEL, input="text").takes_text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": None}, "--url is missing"),
        ({"input": "tokens"}, "requires --model-path"),
        ({"kv_events_endpoint": "tcp://h:1"}, "requires --input tokens"),
        ({"disaggregation_mode": "prefill"}, "requires --input tokens"),
        ({"tool_call_parser": "hermes"}, "requires --input tokens"),
        ({"disaggregation_mode": "encode", "model_path": DEMO_MODEL}, "encode"),
        ({"embedding_models": ["e"], "model_path": DEMO_MODEL}, "--embedding-model"),
        ({"models": ["a", "b"], "served_model_names": ["x"]}, "1 names for 2"),
        ({"kv_events_replay_endpoint": "tcp://h:1", "model_path": DEMO_MODEL}, "requires --kv-events-endpoint"),
        ({"kv_events_endpoint": "h:1", "model_path": DEMO_MODEL}, "missing scheme"),
        ({"max_connections": 0}, "--max-connections 0"),
        ({"stream_timeout_s": 0.0}, "--stream-timeout-s 0"),
        ({"headers": ["nothing"]}, "NAME:VALUE"),
        ({"headers": ["a: b\r\nc: d"]}, "NAME:VALUE"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ],
)
def test_conflicting_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ProxyConfig(**{"url": "http://h", **options})


def test_api_key_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", " secret\n")
    config = ProxyConfig(url="h", api_key_env="SOME_KEY", headers=["X-A: 1", "x-b:2:3"])
    assert config.request_headers() == {"authorization": "Bearer secret", "x-a": "1", "x-b": "2:3"}
    assert "secret" not in repr(config)


def test_proxy_flags_are_read() -> None:
    argv = ["--url", "http://h", "--model", "a", "--model", "b", "--header", "x: 1", "--model-name", "c,d"]
    config = load(ProxyConfig, argv, UNSUPPORTED_WORKER_FLAGS)
    assert (config.models, config.served_model_names, config.headers) == (["a", "b"], ["c", "d"], ["x: 1"])
