"""Requests under way are known by public hashes, or by those of a key."""

from pathlib import Path

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.kv_router.tracking import KEYED
from dynamo.routing.tracking_options import TrackingOptions


def options(*argv: str) -> TrackingOptions:
    return load(TrackingOptions, argv, {})


def test_without_a_key_hashes_are_public() -> None:
    plain = options()
    plain.check_tracking()
    assert plain.tracking_key() is None


def test_a_key_is_read_from_its_file(tmp_path: Path) -> None:
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


def test_keyed_hashes_need_a_key() -> None:
    with pytest.raises(ConfigError):
        options("--router-tracking-hash", KEYED).check_tracking()
