"""Settings of a process from its environment and its flags."""

from dynamo.ops.settings_in_force import is_same, settings_in_force


def test_flags_override_variables() -> None:
    words = ["python", "-m", "dynamo.cpu", "--event-plane", "nats", "--discovery-backend=etcd", "--request-plane"]
    assert settings_in_force({"DYN_EVENT_PLANE": "zmq", "A": "b"}, words) == {
        "DYN_EVENT_PLANE": "nats",
        "DYN_DISCOVERY_BACKEND": "etcd",
        "A": "b",
    }


def test_addresses_are_compared_without_order_and_scheme() -> None:
    assert is_same("ETCD_ENDPOINTS", "http://a:1,http://b:2", "b:2, a:1/")
    assert not is_same("ETCD_ENDPOINTS", "http://a:1", "http://b:1")
    assert is_same("DYN_FILE_KV", "/tmp/kv/", "/tmp/kv")
    assert not is_same("DYN_EVENT_PLANE", "zmq", "nats")
