"""Listening: what is reported of a port that cannot be had."""

import errno

import pytest
import zmq

from dynamo.core.errors import ConfigError
from dynamo.core.listening import bind, listen_error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EADDRINUSE, "uvloop's own words"), "in use by another process (address ::1)"),
        (zmq.ZMQError(errno.EADDRINUSE), "in use by another process (address ::1)"),
        (OSError(errno.EADDRNOTAVAIL, "words"), "cannot listen on ::1: Cannot assign requested address"),
        (PermissionError(errno.EACCES, "words"), "cannot listen on ::1: Permission denied"),
        (zmq.ZMQError(errno.ENODEV), "cannot listen on ::1: No such device"),
    ],
)
def test_listen_error_names_the_setting_and_the_cause(error: Exception, message: str) -> None:
    text = str(listen_error("--port 80", "::1", error))
    assert text.startswith("--port 80: ")
    assert message in text


@pytest.mark.parametrize(("setting", "given"), [("--port", "--port %d"), ("DYN_PORT", "DYN_PORT=%d")])
def test_bind_names_the_setting_of_a_port_that_cannot_be_used(setting: str, given: str) -> None:
    with bind("127.0.0.1", 0, "--port") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=given % port):
            bind("127.0.0.1", port, setting)
    with pytest.raises(ConfigError, match=given % 99999):
        bind("127.0.0.1", 99999, setting)
