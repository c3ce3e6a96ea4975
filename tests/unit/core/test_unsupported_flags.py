"""Upstream's flags that a command does not honour yet."""

from dataclasses import dataclass

import pytest

from dynamo.core.config import option
from dynamo.core.errors import ConfigError
from dynamo.core.unsupported_flags import UnsupportedFlag, declared_flags, drop_unsupported, load

TABLE = (
    UnsupportedFlag("--plane", "PLANE", "tcp", ("--way",)),
    UnsupportedFlag("--sync", None, default=False, hint="X says it"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A command."""

    port: int = option(1, "--port", None, "Where", aliases=("--at",))


def test_unsupported_flag_error_names_value_and_remedy() -> None:
    for argv, words in {
        ("--plane", "quic"): "--plane quic: not supported by this release; only tcp is",
        ("--way=quic",): "--way quic: not supported by this release; only tcp is",
        ("--sync",): "--sync: not supported by this release; X says it",
    }.items():
        with pytest.raises(ConfigError) as caught:
            drop_unsupported(TABLE, argv, {}, ())
        assert str(caught.value) == words


def test_unsupported_flag_check_applies_to_its_variable() -> None:
    with pytest.raises(ConfigError, match="PLANE=quic: --plane is not supported"):
        drop_unsupported(TABLE, [], {"PLANE": "quic"}, ())
    assert drop_unsupported(TABLE, [], {"PLANE": "tcp"}, ()) == []


def test_unsupported_flag_check_skips_declared_options() -> None:
    assert declared_flags(Config) == {"--port", "--at"}
    assert load(Config, ["--no-sync", "--at", "7", "--plane=tcp"], TABLE).port == 7
