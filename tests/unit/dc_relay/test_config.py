"""RelayConfig: limits, addresses and selections that are refused."""

import pytest

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.dc_relay.config import RelayConfig, check_address, limits_of, selected


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "[::1]:5561"])
def test_numeric_addresses_are_accepted(bind: str) -> None:
    check_address(bind)


@pytest.mark.parametrize("bind", ["localhost:1", "127.0.0.1", "::1:5561", "127.0.0.1:65536", "nonsense"])
def test_other_addresses_are_refused(bind: str) -> None:
    with pytest.raises(InvalidArgument, match="must be IP:PORT"):
        check_address(bind)


def test_settings_of_the_listener_require_an_address() -> None:
    assert limits_of({}, {"publication_threshold": 2}, has_listener=False).publication_threshold == 2
    with pytest.raises(InvalidArgument, match="load_window_ms: requires bind"):
        limits_of({}, {"load_window_ms": 5}, has_listener=False)
    with pytest.raises(InvalidArgument, match="must be one of"):
        limits_of({}, {"unknown": 5}, has_listener=True)


def test_invalid_counts_raise_python_errors() -> None:
    with pytest.raises(OverflowError):
        limits_of({}, {"load_window_ms": -1}, has_listener=True)
    with pytest.raises(TypeError):
        limits_of({}, {"load_window_ms": "5"}, has_listener=True)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "config",
    [
        RelayConfig(""),
        RelayConfig(" a"),
        RelayConfig("a", expected_unique_blocks=0),
        RelayConfig("a", expected_unique_blocks=53_687_092),
        RelayConfig("a", namespaces=("a", "a")),
        RelayConfig("a", namespaces=("",)),
        RelayConfig("a", namespaces=("a",), endpoint_prefixes=("b.c",)),
        RelayConfig("a", limits=limits_of({}, {"max_message_bytes": 10}, has_listener=True)),
        RelayConfig("a", limits=limits_of({}, {"publication_queue_bytes": 10}, has_listener=True)),
        RelayConfig("a", limits=limits_of({}, {"load_window_ms": 0}, has_listener=True)),
        RelayConfig("a", limits=limits_of({}, {"load_fanout_capacity": 65_537}, has_listener=True)),
    ],
    ids=str,
)
def test_unusable_setting_is_refused(config: RelayConfig) -> None:
    with pytest.raises(ConfigError, match="KvDcRelay"):
        config.check()


def test_largest_filter_is_accepted() -> None:
    RelayConfig("a", namespaces=("a",), endpoint_prefixes=("a.b",), expected_unique_blocks=53_687_091).check()


def test_contradicting_selections_are_refused() -> None:
    assert selected("a", None, watch_all=None) == ("a",)
    assert selected(None, [], watch_all=None) == ()
    for namespace_filter, namespaces, watch_all in (("a", ["a"], None), (None, ["a"], True), (None, None, False)):
        with pytest.raises(InvalidArgument):
            selected(namespace_filter, namespaces, watch_all=watch_all)
