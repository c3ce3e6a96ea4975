"""KV events that our mocker and the released one publish over their own sockets for the same requests, and replay."""

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from benchmarks.corpus import bench_model
from benchmarks.stacks import HOST, MODEL_NAME, Implementation, Recipe, Stack, free_port, ours, theirs
from tests.cluster.peers import require_peer

from dynamo.kv_events.relay import relayed
from dynamo.protocols.kv_events import Removed, Stored, StoredBlock
from dynamo.tokens.hashing import block_hashes

pytestmark = pytest.mark.conformance

WAIT_MS = 20_000
BLOCK_TOKENS = 16
END = (-1).to_bytes(8, "big", signed=True)
CACHE_FLAGS = ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "12"]


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


def implementations(peer: str) -> tuple[Implementation, Implementation]:
    return ours(), theirs(peer)


def send_request(stack: Stack, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 9, **more}
    status, answer = stack.send_request("POST", "/v1/completions", body, timeout_s=30)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def prompt_of(number: int) -> list[int]:
    """Return two blocks and a token of a third, which a response of nine tokens does not fill."""
    return list(range(100 + 40 * number, 100 + 40 * number + 2 * BLOCK_TOKENS + 1))


def read(socket: "zmq.Socket[bytes]") -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing came"
    return socket.recv_multipart()


def replay(context: "zmq.Context[Any]", port: int, start: int) -> list[list[bytes]]:
    """Return all messages replayed from a sequence number on."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{HOST}:{port}")
        dealer.send_multipart([b"", struct.pack(">Q", start)])
        frames: list[list[bytes]] = []
        while True:
            frames.append(read(dealer))
            if frames[-1][-1] == b"":
                return frames


def recorded_frames(implementation: Implementation) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Return the frames that a mocker publishes for some prompts, and those it replays from the second on."""
    port, replay_port = free_port(), free_port()
    flags = [*CACHE_FLAGS, "--zmq-kv-events-ports", str(port), "--zmq-replay-ports", str(replay_port)]
    recipe = Recipe(name=implementation.name, frontend=ours(), engine=implementation, engine_flags=flags)
    with Stack(recipe, bench_model()) as stack, zmq.Context() as context:
        before = len(replay(context, replay_port, 0)) - 1
        with context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.LINGER, 0)
            subscriber.subscribe(b"")
            subscriber.connect(f"tcp://{HOST}:{port}")
            number = 50
            while not subscriber.poll(200):  # A subscriber gets no confirmation of its subscription.
                send_request(stack, prompt_of(number))
                number += 1
                assert number < 150, "nothing is published"
            live = subscriber.recv_multipart()
        for number in (0, 1, 0, 2, 3, 4, 5, 6):
            send_request(stack, prompt_of(number))
        again = replay(context, replay_port, 0)
        assert live in [[b"", *frames[2:]] for frames in again], "what is told again is what was told"
        assert len(again) - 1 > before
        return again, replay(context, replay_port, 1_000_000)


def events_of(frames: list[list[bytes]]) -> list[dict[str, Any]]:
    """Return the events from the first prompt of the test on; consecutive removals are merged."""
    found: list[dict[str, Any]] = []
    for payload in (frame[3] for frame in frames if frame[3]):
        for event in msgspec.msgpack.decode(payload)[1]:
            if found and event["type"] == found[-1]["type"] == "BlockRemoved":
                found[-1]["block_hashes"] += event["block_hashes"]
            else:
                found.append(event)
    first = next(n for n, event in enumerate(found) if prompt_of(0)[0] in event.get("token_ids", ()))
    return found[first:]


def test_both_mockers_publish_the_same_frames_for_the_same_prompts(peer: str) -> None:
    (mine, mine_late), (other, other_late) = (
        recorded_frames(implementation) for implementation in implementations(peer)
    )
    for frames in (mine, other):
        assert [len(frame) for frame in frames] == [4] * len(frames)
        assert all(frame[:2] == [b"", b""] for frame in frames)
        assert [frame[2] for frame in frames] == [*(struct.pack(">Q", n) for n in range(len(frames) - 1)), END]
    assert mine_late == other_late == [[b"", b"", END, b""]]
    stored = [[one for one in events_of(frames) if one["type"] == "BlockStored"] for frames in (mine, other)]
    assert stored[0] == stored[1]
    assert any(event["type"] == "BlockRemoved" for event in events_of(mine))
    assert {tuple(event) for event in events_of(mine)} == {tuple(event) for event in events_of(other)}


def test_our_relay_reads_events_of_the_released_relay(peer: str) -> None:
    frames, _ = recorded_frames(theirs(peer))

    def make_stored(tokens: Any, sizes: Any, hashes: Any, parent: Any, *_: Any, **__: Any) -> Stored:
        local = block_hashes(list(tokens), BLOCK_TOKENS)
        return Stored(parent, None, [StoredBlock(one, two) for one, two in zip(hashes, local, strict=True)])

    received = [one for frame in frames if frame[3] for one in relayed(frame[3], BLOCK_TOKENS, 0, make_stored)]
    assert {type(one.event) for one in received} == {Stored, Removed}
    assert {one.tier for one in received} == {"device"}
    held: set[int] = set()
    for one in received:
        if isinstance(one.event, Stored):
            held |= {block.block_hash for block in one.event.blocks}
        elif isinstance(one.event, Removed):
            assert held >= set(one.event.block_hashes), "nothing goes that never came"
            held -= set(one.event.block_hashes)
    assert 0 < len(held) <= 12


def row(first: int, **more: Any) -> dict[str, Any]:
    tokens = [first, first + 1, first + 2]
    return {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1], "output_token_ids": tokens, **more}


@pytest.mark.parametrize("implementation", ["ours", "theirs"])
def test_recorded_answers_have_the_same_names(peer: str, implementation: str, tmp_path: Path) -> None:
    """Both use `request_id`, or the session and the number of its previous lines."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        row(101, session_id="s"),
        row(104, session_id="s", request_id="q"),
        row(107, session_id="s", turn=9),
        {**row(0, session_id="u"), "output_token_ids": None},
        row(110, session_id="u"),
    ]
    trace.write_text("".join(json.dumps({k: v for k, v in one.items() if v is not None}) + "\n" for one in rows))
    flags = ["--response-replay-trace-path", str(trace)]
    engine = ours() if implementation == "ours" else theirs(peer)
    with Stack(Recipe(name=implementation, frontend=ours(), engine=engine, engine_flags=flags), bench_model()) as stack:
        output = {}
        for name in ("s:0", "q", "s:1", "s:2", "u:0", "u:1", "no-such-model"):
            nvext = {"annotations": [f"output_replay_id:{name}"], "extra_fields": ["completion_token_ids"]}
            answer = send_request(stack, [5] * 20, nvext=nvext)
            output[name] = answer["nvext"]["completion_token_ids"]
            assert answer["choices"][0]["finish_reason"] == "length"
    assert (output["s:0"], output["q"], output["s:2"], output["u:1"]) == (
        [101, 102, 103],
        [104, 105, 106],
        [107, 108, 109],
        [110, 111, 112],
    )
    assert {len(output[name]) for name in ("s:1", "u:0", "no-such-model")} == {9}, "random, and as long as they may be"
