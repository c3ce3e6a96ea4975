"""A client of a realtime model: sends and prints events. Run by the peer's Python, which has aiohttp."""

import asyncio
import json
import sys

import aiohttp

EVENTS = [
    {"type": "session.update", "session": {"type": "realtime", "model": "realtime"}},
    {"type": "input_audio_buffer.append", "audio": "AAAA"},
]


async def main():
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{sys.argv[1]}/v1/realtime?model=realtime") as socket,
    ):
        print("heard", json.loads((await socket.receive()).data)["type"], flush=True)
        for event in EVENTS:
            await socket.send_str(json.dumps(event))
            print("heard", json.loads((await socket.receive()).data).get("delta"), flush=True)


asyncio.run(main())
