"""Both frontends in kv mode before the same workers: they share their state and make the same decisions.

The released router writes its choice and its cost into its log, ours into the answer.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import MODEL_NAME, Recipe, Stack, ours, theirs
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

BLOCK = 16
TIMEOUT_S = 60.0
KV_ROUTER = ("--router-mode", "kv")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CHOICE = re.compile(r"Selected worker .*request_id=\"([^\"]*)\" worker_id=(\d+) .*logit=([0-9.]+)")


@dataclass(frozen=True)
class Choice:
    """Decision for a prompt: worker, overlap and cost."""

    worker_id: int
    cost: float
    hit_rate: float
    cached_tokens: int
    reply: str


class Frontend:
    """Frontend of one implementation."""

    def __init__(self, stack: Stack, *, is_ours: bool) -> None:
        self.stack = stack
        self.is_ours = is_ours

    def until_known(self, turn: str, worker: int) -> None:
        """Send a prompt to a worker until this frontend's router has its blocks.

        Without the name of the worker, another one could be chosen, which would then cache the prompt too.
        """
        until(lambda: self.send_request(turn, worker=worker).hit_rate > 0.9, "its blocks are not known")

    def send_request(self, *turns: str, worker: int | None = None) -> Choice:
        """Send a conversation's next request: turns of the user, alternating with the assistant's.

        The worker is named in the request where one is given, otherwise the router chooses it.
        """
        messages = [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
        reported = ["worker_id", "timing", *(["routing"] if self.is_ours else [])]
        nvext = {"extra_fields": reported} | ({} if worker is None else {"backend_instance_id": worker})
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 2, "nvext": nvext}
        status, answer = self.stack.send_request("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        return self._choice(answer, is_named=worker is not None)

    def _choice(self, answer: dict[str, Any], *, is_named: bool) -> Choice:
        nvext = answer["nvext"]
        worker_id = nvext["worker_id"]["decode_worker_id"]
        if is_named:
            cost = 0.0  # The released router logs no choice.
        elif self.is_ours:
            cost = nvext["routing"]["cost"]
        else:
            chosen, cost = self._logged(answer["id"].removeprefix("chatcmpl-"))
            assert chosen == worker_id
        return Choice(
            worker_id,
            cost,
            nvext["timing"]["kv_hit_rate"],
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            answer["choices"][0]["message"]["content"] or "",
        )

    def _logged(self, request_id: str) -> tuple[int, float]:
        """Return the released router's log of a request."""
        found: list[tuple[int, float]] = []

        def is_reported() -> bool:
            log = COLOURS.sub("", Path(self.stack._log_path(0)).read_text())
            found.extend((int(worker), float(cost)) for name, worker, cost in CHOICE.findall(log) if name == request_id)
            return bool(found)

        until(is_reported, f"its log says nothing of request {request_id}")
        return found[0]


@dataclass(frozen=True)
class FrontendPair:
    """Both frontends."""

    ours: Frontend
    theirs: Frontend


def until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def worker_ids(frontend: Frontend) -> set[int]:
    status, health = frontend.stack.send_request("GET", "/health")
    listed = [one for one in health["instances"] if one["endpoint"] == "generate"] if status == 200 else []
    return {one["instance_id"] for one in listed}


@pytest.fixture(scope="module", params=["their mockers", "our mockers", "our CPU engines"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendPair]:
    require_peer()
    peer = theirs(peer_python())
    engine = peer if request.param == "their mockers" else ours()
    is_cpu = request.param == "our CPU engines"
    variables = {"DYN_FILE_KV": str(tmp_path_factory.mktemp("kv"))}
    own = Recipe(
        name="two-ours", frontend=ours(), engine=engine, workers=2, frontend_flags=KV_ROUTER, variables=variables,
        program=str(Path(__file__).with_name("cpu_engine.py")) if is_cpu else "",
        engine_flags=("--block-size", str(BLOCK), *(() if is_cpu else ("--num-gpu-blocks-override", "160"))),
    )  # fmt: skip
    other = Recipe(
        name="two-theirs", frontend=peer, engine=peer, workers=0, frontend_flags=KV_ROUTER, variables=variables
    )
    with Stack(own, bench_model()) as first, Stack(other, bench_model()) as second:
        found = FrontendPair(Frontend(first, is_ours=True), Frontend(second, is_ours=False))
        for frontend in (found.ours, found.theirs):
            until(lambda frontend=frontend: len(worker_ids(frontend)) == 2, "a worker is missing")  # type: ignore[misc]
        yield found


def prompt(number: int) -> str:
    """Return a long prompt that shares only the template's prefix with other numbers."""
    return " ".join(f"{number} item {number * 1000 + word}" for word in range(20))


def test_routers_have_equal_cached_blocks_and_costs(pair: FrontendPair) -> None:
    first = {number: pair.ours.send_request(prompt(number)) for number in range(1, 4)}
    first |= {number: pair.theirs.send_request(prompt(number)) for number in range(4, 7)}
    for number, before in first.items():
        for frontend in (pair.ours, pair.theirs):
            frontend.until_known(prompt(number), before.worker_id)
        mine, other = pair.ours.send_request(prompt(number)), pair.theirs.send_request(prompt(number))
        assert mine.worker_id == other.worker_id == before.worker_id, "the holder is asked"
        assert mine.hit_rate == pytest.approx(other.hit_rate)
        assert mine.cost == pytest.approx(other.cost, rel=1e-4)
        assert min(mine.cached_tokens, other.cached_tokens) >= 4 * BLOCK, "it has what both think it has"


def test_second_turn_is_routed_to_the_worker_of_the_first(pair: FrontendPair) -> None:
    for number in range(10, 14):
        opening = prompt(number)
        first = pair.theirs.send_request(opening)
        for frontend in (pair.theirs, pair.ours):
            frontend.until_known(opening, first.worker_id)
        turns = (opening, first.reply, f"and what of {number}?")
        second = pair.theirs.send_request(*turns)
        assert second.worker_id == first.worker_id
        assert second.hit_rate > 0.5
        mine = pair.ours.send_request(*turns)
        assert mine.worker_id == first.worker_id


def test_both_routers_ignore_evicted_blocks(pair: FrontendPair, request: pytest.FixtureRequest) -> None:
    if "CPU" in request.node.name:
        pytest.skip("its cache is too large to be filled here")
    holder = pair.ours.send_request(prompt(20)).worker_id
    for frontend in (pair.ours, pair.theirs):
        frontend.until_known(prompt(20), holder)
    # Each cache has room for fourteen of them. Between idle workers, our router would choose at random.
    ids = sorted(worker_ids(pair.ours))
    for number in range(100, 160):
        pair.ours.send_request(prompt(number), worker=ids[number % 2])
    for number in (158, 159):  # The last one of each worker: so are its earlier events.
        pair.theirs.until_known(prompt(number), ids[number % 2])
    gone = pair.theirs.send_request(prompt(20))
    assert gone.hit_rate < 0.5
    assert gone.cached_tokens < 3 * BLOCK, "it was truly evicted"
    mine = pair.ours.send_request(prompt(1))
    assert mine.hit_rate < 0.5
    assert mine.cached_tokens < 3 * BLOCK
