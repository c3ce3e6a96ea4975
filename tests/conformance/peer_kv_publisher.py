"""Engine side of KV events, by calls and over a ZMQ socket. Runs under our Python and under a released peer's."""

import asyncio
import struct
import sys

import msgspec
import zmq

from dynamo.llm import KvEventPublisher
from dynamo.runtime import DistributedRuntime, dynamo_worker


def pushed(publisher):
    """Publish the events of an engine by calls."""
    publisher.publish_stored([1, 2, 3, 4, 5, 6, 7, 8], [4, 4], [-1, 11])
    publisher.publish_stored([9, 10, 11, 12], [4], [12], parent_hash=11, lora_name="adapter")
    publisher.publish_stored([9, 10, 11, 12], [4], [13], parent_hash=-1, cache_salt="salt")
    publisher.publish_stored([9, 10, 11], [3], [14])
    publisher.publish_removed([11, -1])
    shown = [{"mm_objects": [{"mm_hash": one, "offsets": [[1, 4]]} for one in images]} for images in ((7,), (7, 8))]
    publisher.publish_stored([1, PAD, PAD, PAD, PAD, 2, PAD, PAD], [4, 4], [41, 42], None, shown)
    publisher.publish_stored([1, 2, 3, 4, 5, 6, 7, 8], [4, 4], [43, 44], 42, shown)
    publisher.publish_batch(
        [
            {"type": "stored", "token_ids": [1, 2, 3, 4], "num_block_tokens": [4], "block_hashes": [21]},
            {"type": "removed", "block_hashes": [12, 13]},
            {"type": "removed", "block_hashes": [21]},
        ]
    )


PAD = 99
"""The placeholder of an image."""
IMAGE, OTHER = "c04e5527423bb9fb" + "0" * 48, "be55e72a82f09a72" + "0" * 48
EVENTS = [
    {"type": "BlockStored", "block_hashes": [31, 32], "parent_block_hash": None, "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
     "block_size": 4, "lora_id": None, "medium": "GPU", "group_idx": 0},
    ["BlockStored", [33], 32, [9, 10, 11, 12], 4, None, "GPU"],
    {"type": "BlockStored", "block_hashes": [34], "parent_block_hash": 33, "token_ids": [1, 1, 1, 1],
     "block_size": 4, "medium": "CPU"},
    {"type": "BlockStored", "block_hashes": [35], "parent_block_hash": None, "token_ids": [1, 1, 1, 1],
     "block_size": 4, "medium": "REMOTE"},
    {"type": "BlockStored", "block_hashes": [36], "parent_block_hash": None, "token_ids": [1, 1, 1, 1],
     "block_size": 4, "medium": "GPU", "group_idx": 1},
    {"type": "BlockStored", "block_hashes": [37], "parent_block_hash": None, "token_ids": [2, 2, 2, 2],
     "block_size": 4, "lora_name": "adapter"},
    {"type": "BlockStored", "block_hashes": [38, 39], "parent_block_hash": None,
     "token_ids": [1, PAD, PAD, PAD, PAD, 2, PAD, PAD], "block_size": 4, "lora_id": None, "medium": "GPU",
     "extra_keys": [[[IMAGE, 1]], ["salt", OTHER[:16] + "1" * 48, [IMAGE, -3], [OTHER, 2]]]},
    ["BlockStored", [40, 41], 39, [PAD, 1, PAD, 2, 3, 4, 5, 6], 4, None, "GPU", None, [[IMAGE], [OTHER]]],
    ["BlockStored", [42], 41, [PAD, 1, PAD, 2], 4, None, "GPU", None, [["x", IMAGE[:16]]], 0],
    {"type": "BlockRemoved", "block_hashes": [32, 33], "medium": "GPU"},
    ["BlockRemoved", [31]],
    {"type": "BlockRemoved", "block_hashes": [5], "medium": "STORAGE"},
    {"type": "AllBlocksCleared"},
]  # fmt: skip


async def relayed(address):
    """Publish the events of an engine over its own socket: one event a message, then all again in one."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.bind(address)
        while not socket.poll(0):  # noqa: ASYNC110 - the subscription of the relay, which is not confirmed to it
            await asyncio.sleep(0.02)
        for sequence, events in enumerate([*([event] for event in EVENTS), EVENTS]):
            payload = msgspec.msgpack.encode([1.5, events, 3])
            socket.send_multipart([b"", struct.pack(">Q", sequence), payload])
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)


@dynamo_worker()
async def main(runtime: DistributedRuntime, mode, address):
    """Publish at the first line of standard input, and run until standard input ends."""
    endpoint = runtime.endpoint("ns.comp.ep")
    if mode == "pushed":
        publisher = KvEventPublisher(endpoint, kv_block_size=4, dp_rank=2, image_token_id=PAD)
    else:
        publisher = KvEventPublisher(endpoint, kv_block_size=4, dp_rank=2, image_token_id=PAD, zmq_endpoint=address)
    print("serving", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if mode == "pushed":
        pushed(publisher)
    else:
        await relayed(address)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    publisher.shutdown()


asyncio.run(main(*sys.argv[1:]))
