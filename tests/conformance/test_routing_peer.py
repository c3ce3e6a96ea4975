"""Routing across implementations: equal hashes of any prompt, and equal results of both trees for the same history.

Histories are those of engines: keys are sequence hashes, and only leaves are evicted.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.peers import require_peer

from dynamo.llm import RadixTree, compute_block_hash_for_seq
from dynamo.tokens.hashing import sequence_hashes

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


def query_peer(peer: str, home: Path, questions: dict[str, Any]) -> dict[str, Any]:
    variables = {**os.environ, "HOME": str(home), "DYN_LOG": "off"}
    command = [peer, str(HERE / "peer_routing.py")]
    done = subprocess.run(
        command, input=json.dumps(questions), capture_output=True, text=True, env=variables, timeout=120, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def random_question(rng: random.Random) -> dict[str, Any]:
    size = rng.choice([1, 2, 16, 64])
    tokens = [rng.randrange(1 << rng.choice([8, 17, 32])) for _ in range(rng.randrange(300))]
    media = [
        None
        if rng.random() < 0.5
        else {"mm_objects": [{"mm_hash": rng.randrange(1 << 64), "offsets": [[0, 3]]} for _ in range(rng.randrange(4))]}
        for _ in range(rng.randrange(8))
    ]
    return {
        "tokens": tokens,
        "kv_block_size": size,
        "block_mm_infos": rng.choice([None, media]),
        "lora_name": rng.choice([None, "", "adapter", "Адаптер"]),
        "is_eagle": rng.choice([None, False, True]),
        "cache_namespace": rng.choice([None, "", "tenant"]),
    }


class Engine:
    """The cache of one rank."""

    def __init__(self, worker: int, dp_rank: int) -> None:
        self.worker, self.dp_rank = worker, dp_rank
        self.held: dict[int, int] = {}
        """Parent of each key, 0 at the start."""
        self.number = 0

    def event(self, data: Any) -> list[Any]:
        self.number += 1
        return ["event", self.worker, {"event_id": self.number, "data": data, "dp_rank": self.dp_rank}]

    def store(self, prompt: list[int]) -> list[Any] | None:
        keys = sequence_hashes(prompt)
        known = sum(1 for key in keys if key in self.held)
        fresh = [*zip(keys, prompt, strict=True)][known:]
        if not fresh:
            return None
        parent = keys[known - 1] if known else None
        for key, before in zip(keys[known:], [parent or 0, *keys[known:]], strict=False):
            self.held[key] = before
        blocks = [{"block_hash": key, "tokens_hash": tokens, "mm_extra_info": None} for key, tokens in fresh]
        return self.event({"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}})

    def evict(self, rng: random.Random) -> list[Any] | None:
        gone: list[int] = []
        for _ in range(rng.randrange(1, 5)):
            leaves = sorted(set(self.held) - set(self.held.values()))
            if leaves:
                gone.append(rng.choice(leaves))
                del self.held[gone[-1]]
        return self.event({"removed": {"block_hashes": gone}}) if gone else None


def random_history(rng: random.Random) -> list[list[Any]]:
    engines = [Engine(worker, rank) for worker in (1, 2, 3) for rank in (0, 1)]
    words = [rng.randrange(1 << 64) for _ in range(6)]
    steps: list[list[Any]] = []
    for _ in range(150):
        prompt = [rng.choice(words) for _ in range(rng.randrange(1, 9))]
        engine, turn = rng.choice(engines), rng.random()
        if turn < 0.45:
            step = engine.store(prompt)
        elif turn < 0.65:
            step = engine.evict(rng)
        elif turn < 0.67:
            engine.held.clear()
            step = engine.event("cleared")
        elif turn < 0.69:
            for one in engines:
                if one.worker == engine.worker:
                    one.held.clear()
            step = ["leave", engine.worker, None]
        else:
            step = ["find", 0, prompt]
        if step is not None:
            steps.append(step)
    return steps


def ours(steps: list[list[Any]]) -> list[list[list[int]]]:
    tree, found = RadixTree(), []
    for kind, worker, value in steps:
        if kind == "event":
            tree.apply_event(worker, json.dumps(value).encode())
        elif kind == "leave":
            tree.remove_worker(worker)
        else:
            scores = tree.find_matches(value).scores
            found.append(sorted([*rank, blocks] for rank, blocks in scores.items()))
    return found


def test_block_hashes_and_event_histories_equal_the_released_ones(peer: str, tmp_path: Path) -> None:
    rng = random.Random(161)
    questions = [random_question(rng) for _ in range(400)]
    histories = [random_history(rng) for _ in range(40)]
    theirs = query_peer(peer, tmp_path, {"hashes": questions, "histories": histories})
    for question, hashes in zip(questions, theirs["hashes"], strict=True):
        assert compute_block_hash_for_seq(**question) == hashes, question
    for number, (steps, scores) in enumerate(zip(histories, theirs["histories"], strict=True)):
        assert ours(steps) == scores, f"history {number}"
    assert any(any(scores) for scores in theirs["histories"])
