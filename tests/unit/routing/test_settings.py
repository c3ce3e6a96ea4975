"""Settings: flags become the router's configuration."""

from pathlib import Path

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.kv_router.tracking import KEYED
from dynamo.routing.settings import KvRouterOptions, TrackingOptions, router_config


@pytest.mark.parametrize(
    ("given", "threshold", "order"),
    [
        ({}, None, "fcfs"),
        ({"router_queue_threshold": 2.0}, 2.0, "fcfs"),
        ({"router_queue_threshold": 2.0, "router_queue_policy": "wspt"}, 2.0, "wspt"),
        ({"router_policy": "balanced"}, 1.0, "deadline"),
        ({"router_policy": "balanced", "router_queue_threshold": 2.0}, 2.0, "deadline"),
        ({"router_policy": "balanced", "router_queue_policy": "fcfs"}, 1.0, "fcfs"),
    ],
)
def test_balanced_mode_queues_in_the_router_by_default(
    given: dict[str, object], threshold: float | None, order: str
) -> None:
    config = router_config(KvRouterOptions(**given), 16)  # type: ignore[arg-type]
    assert (config.queue_threshold, config.queue_policy) == (threshold, order)


def options(*argv: str) -> TrackingOptions:
    return load(TrackingOptions, argv, {})


def test_tracking_hashes_without_a_key_are_unkeyed() -> None:
    plain = options()
    plain.check_tracking()
    assert plain.tracking_key() is None


def test_tracking_key_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(bytes(32))
    keyed = options(
        "--router-tracking-hash", KEYED, "--router-tracking-key-file", str(file), "--router-tracking-key-id", "a"
    )
    keyed.check_tracking()
    assert keyed.tracking_key() is not None
    file.unlink()
    with pytest.raises(ConfigError):
        keyed.tracking_key()


def test_keyed_tracking_hash_requires_a_key() -> None:
    with pytest.raises(ConfigError):
        options("--router-tracking-hash", KEYED).check_tracking()
