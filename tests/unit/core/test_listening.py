"""Listening: errors of a port that cannot be bound."""

import errno

import pytest
import zmq

from dynamo.core.listening import listen_error


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
