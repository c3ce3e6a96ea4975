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


def test_the_refusal_says_what_was_seen_and_what_to_do() -> None:
    for argv, words in {
        ("--plane", "quic"): "--plane quic: not supported by this release; only tcp is",
        ("--way=quic",): "--way quic: not supported by this release; only tcp is",
        ("--sync",): "--sync: not supported by this release; X says it",
    }.items():
        with pytest.raises(ConfigError) as caught:
            drop_unsupported(TABLE, argv, {}, ())
        assert str(caught.value) == words


def test_a_variable_is_judged_as_its_flag_is() -> None:
    with pytest.raises(ConfigError, match="PLANE=quic: --plane is not supported"):
        drop_unsupported(TABLE, [], {"PLANE": "quic"}, ())
    assert drop_unsupported(TABLE, [], {"PLANE": "tcp"}, ()) == []


def test_what_a_configuration_declares_is_left_to_it() -> None:
    assert declared_flags(Config) == {"--port", "--at"}
    assert load(Config, ["--no-sync", "--at", "7", "--plane=tcp"], TABLE).port == 7
