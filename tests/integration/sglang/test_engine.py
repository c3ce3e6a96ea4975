"""KV events of the SGLang adapter over ZMQ."""

from tests.unit.sglang.conftest import Start


async def test_kv_event_address_is_registered(start: Start) -> None:
    running = await start({"kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:1"}'})
    assert running.config.publishes_kv_events
