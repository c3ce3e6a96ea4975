"""KV events of the SGLang adapter over ZMQ."""

from tests.unit.sglang.conftest import Start


async def test_events_are_announced_where_they_are_published(start: Start) -> None:
    running = await start({"kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:1"}'})
    assert running.config.publishes_kv_events
