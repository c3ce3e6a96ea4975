"""Events: where a server's ranks are listened to."""

import pytest
from tests.unit.openai_proxy.hosts import Host

from dynamo.core.errors import ConfigError
from dynamo.openai_proxy.token_engine import kv_listeners


def test_each_rank_has_its_own_event_port() -> None:
    listeners = kv_listeners("tcp://h:5557", "tcp://h:6557", 2, 16, Host())
    assert [(one.endpoint, one.replay_endpoint) for one in listeners] == [
        ("tcp://h:5557", "tcp://h:6557"),
        ("tcp://h:5558", "tcp://h:6558"),
    ]
    assert kv_listeners("ipc:///x", None, 1, 16, Host())[0].replay_endpoint is None


def test_several_ranks_require_ports() -> None:
    with pytest.raises(ConfigError, match="tcp://host:port"):
        kv_listeners("ipc:///x", None, 2, 16, Host())
