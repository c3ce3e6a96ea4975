"""Accept loop for connections that are served by threads, and the check of a local peer's user."""

import logging
import random
import socket
import struct
import threading
from collections.abc import Callable

from dynamo.core.backoff import Backoff
from dynamo.core.private_paths import user_id

logger = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 0.05, 1.0  # A failed accept usually means too few file descriptors, which is temporary.
_CREDENTIALS = struct.Struct("3i")  # <sys/socket.h>: process, user and group of a peer.


def accept_connections(
    listener: socket.socket, is_closed: threading.Event, take: Callable[[socket.socket], None], subject: str
) -> None:
    """Pass each new connection to `take`, which owns it from then on, until `is_closed` is set.

    To stop, set the event and then shut the listener down. `subject` names the connections in the log.
    """
    backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
    is_failing = False
    while not is_closed.is_set():
        try:
            link, _ = listener.accept()
        except OSError as error:
            if is_closed.is_set():
                return
            if not is_failing:
                logger.warning("cannot accept connections %s, trying again: %s", subject, error)
            is_failing = True
            is_closed.wait(backoff.next(random.random()))
            continue
        if is_failing:
            logger.warning("accepting connections %s again", subject)
        is_failing = False
        backoff.reset()
        take(link)


def is_own_user(link: socket.socket) -> bool:
    """Return whether the other end of a Unix socket runs as this process's user.

    Where the system cannot report the peer's user, return True: the sockets' directories and names must suffice.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == user_id())
