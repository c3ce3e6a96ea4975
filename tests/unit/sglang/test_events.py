"""SGLang events: addresses of publishers and subscribers."""

import pytest
from tests.unit.vllm.conftest import Host

from dynamo.core.errors import ConfigError
from dynamo.sglang.events import kv_listeners, of_rank, publisher_of


@pytest.mark.parametrize("text", [None, "", "{}", '{"publisher": "null"}', '{"publisher": null}'])
def test_kv_events_are_not_published_without_configuration(text: str | None) -> None:
    assert publisher_of(text) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"publisher": "kafka"}'])
def test_malformed_kv_events_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-config"):
        publisher_of(text)


def test_each_rank_has_its_own_event_port() -> None:
    found = kv_listeners({"endpoint": "tcp://*:20", "replay_endpoint": "tcp://*:30"}, 2, 16, Host())
    assert [(one.endpoint, one.replay_endpoint) for one in found] == [
        ("tcp://127.0.0.1:20", "tcp://127.0.0.1:30"),
        ("tcp://127.0.0.1:21", "tcp://127.0.0.1:31"),
    ]
    assert of_rank("inproc://cache", 1) == "inproc://cache_dp1"
    with pytest.raises(ConfigError):
        of_rank("tcp://host", 1)
