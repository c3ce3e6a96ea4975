"""Accept loop of the servers that have a thread for it: it ends when the server closes, and on no error."""

import logging
import random
import socket
import threading
from collections.abc import Callable

from dynamo.core.backoff import Backoff

logger = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 0.05, 1.0  # A failed accept is most likely a lack of file descriptors, which passes.


def accept_connections(
    listener: socket.socket, is_closed: threading.Event, take: Callable[[socket.socket], None], subject: str
) -> None:
    """Pass each new connection to `take`, which owns it from then on, until `is_closed` is set.

    The one who closes sets the event and then shuts the listener down. `subject` names the connections in the log.
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
            logger.warning("connections %s are accepted again", subject)
        is_failing = False
        backoff.reset()
        take(link)
