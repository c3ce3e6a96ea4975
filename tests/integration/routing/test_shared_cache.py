"""A shared cache whose events arrive over ZMQ."""

from functools import partial
from itertools import count

import zmq
import zmq.asyncio
from tests.settle import repeat
from tests.unit.routing.test_shared_cache import card, holds, publish, shared


async def test_shared_cache_follows_the_event_address_of_the_worker_cards() -> None:
    context = zmq.asyncio.Context()
    first, second = context.socket(zmq.PUB), context.socket(zmq.PUB)
    ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (first, second)]
    found = shared()
    await found.start()
    try:
        for store, port, place in ((first, ports[0], 0), (second, ports[1], 1)):
            found.apply_cards([card(kv_events_endpoint=f"tcp://127.0.0.1:{port}")])
            await repeat(partial(publish, store, place, count(1)), partial(holds, found, place))
    finally:
        await found.close()
        first.close(0)
        second.close(0)
        context.term()
