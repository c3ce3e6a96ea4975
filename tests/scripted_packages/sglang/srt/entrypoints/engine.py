"""`Engine` that repeats its prompt, publishes its cache events, and connects to its other phase by a bootstrap server."""

import asyncio
import json
import signal
import struct
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import echo
import msgspec
import zmq
from tests.unit.sglang import scripted

ABORTED = {"type": "abort", "message": "Aborted"}
WAIT_S = 60.0


class TokenizerManager(scripted.TokenizerManager):
    def auto_create_handle_loop(self) -> None:
        """Handle the signals of termination and of failed children, as the real one does."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGQUIT):
            loop.add_signal_handler(number, echo.note, "signals", number.name)


class Engine(scripted.Engine):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokenizer_manager = TokenizerManager()
        args = self.server_args
        self._child = echo.start_child()
        self._held = echo.Held(args.page_size)
        self._number = 0
        self._socket: Any = None
        self._dropped: set[str] = set()
        self._rooms: dict[int, asyncio.Future[bytes]] = {}
        self._server: asyncio.Server | None = None
        self.tokenizer_manager.model_config = SimpleNamespace(attention_arch=None)
        self.tokenizer_manager.context_len = 4096
        self.tokenizer_manager.on_abort = self._dropped.add
        self._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"] = 65536
        if args.kv_events_config:
            self._socket = zmq.Context.instance().socket(zmq.PUB)
            self._socket.bind(json.loads(args.kv_events_config)["endpoint"])

    async def run_request(self, given: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        prompt, sampling, rid = given["input_ids"], given["sampling_params"], given["rid"] or "warm-up"
        mode = self.server_args.disaggregation_mode
        host = given["bootstrap_host"]
        if mode != "null" and host != scripted.FAKE_BOOTSTRAP_HOST:
            if mode == "prefill":
                await self._hand_over(given["bootstrap_room"], echo.digest(prompt))
            elif await self._fetch(host, given["bootstrap_port"], given["bootstrap_room"]) != echo.digest(prompt):
                yield self._chunk([], rid, {**ABORTED, "message": "another prompt's blocks", "status_code": 500})
                return
        cached, parent, names, tokens = self._held.add(prompt)
        self._publish(parent, names, tokens)
        count = sampling["max_new_tokens"]
        for at, token in enumerate(echo.answer(prompt, count), 1):
            await asyncio.sleep(echo.STEP_S)
            if rid in self._dropped:
                echo.note("aborted", rid)
                yield self._chunk([], rid, ABORTED)
                return
            yield self._chunk([token], rid, {"type": "length", "length": at} if at == count else None, cached)

    def _chunk(self, tokens: list[int], rid: str, finish: Any, cached: int = 0) -> dict[str, Any]:
        return scripted.chunk(*tokens, rid=rid, finish=finish, cached_tokens=cached)

    def _publish(self, parent: int | None, names: list[int], tokens: list[int]) -> None:
        if self._socket is None or not names:
            return
        size = self._held.block_tokens
        event = {
            "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens,
            "block_size": size, "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        self._socket.send_multipart([b"", struct.pack(">Q", self._number), payload])
        self._number += 1

    # Bootstrap connection.

    def _room(self, room: int) -> "asyncio.Future[bytes]":
        return self._rooms.setdefault(room, asyncio.get_running_loop().create_future())

    async def _hand_over(self, room: int, blocks: bytes) -> None:
        if self._server is None:
            port = self.server_args.disaggregation_bootstrap_port
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self._room(room).set_result(blocks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (room,) = struct.unpack(">Q", await reader.readexactly(8))
        writer.write(await asyncio.wait_for(self._room(room), WAIT_S))
        await writer.drain()
        writer.close()

    async def _fetch(self, host: str, port: int, room: int) -> bytes:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
        writer.write(struct.pack(">Q", room))
        blocks = await asyncio.wait_for(reader.readexactly(32), WAIT_S)
        writer.close()
        echo.note("fetched", str(room))
        return blocks

    def get_all_child_pids(self) -> list[int]:
        return [self._child.pid]

    def shutdown(self) -> None:
        super().shutdown()
        echo.stop_child(self._child)
