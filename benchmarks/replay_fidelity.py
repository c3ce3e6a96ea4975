"""Replay fidelity: the same requests, router and engines in real time and in virtual time.

    python -m benchmarks.replay_fidelity [--requests 2000] [--workers 4] [--rate 20] [--speedup 1]

Real time: the mocker's ranks on this machine's clock, the production router between them, token by token, in one
process without a network. Virtual time: `dynamo.replay`. The difference is the delay of the machine's clock and
scheduler: on a busy machine a `--speedup` below 1, slower engines and proportionally fewer requests, makes it small
relative to the steps.
"""

import argparse
import asyncio
import random
import time
from statistics import mean
from typing import Any, cast

from benchmarks.report import write_result
from dynamo.core.clock import SystemClock
from dynamo.kv_router.config import RoutingConfig
from dynamo.mocker.convert import SimulationInput
from dynamo.mocker.engine import RankRunner
from dynamo.mocker.simulation.scheduler import Simulation, StepResult
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession
from dynamo.replay.placement import KvPlacement, PlacementRequest
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.synthetic import Shape, sessions
from dynamo.tokens.hashing import packed_block_hashes

BLOCK = 512
HASH_SEED = 1337


class TimedReply:
    """Reply that records the times of its tokens."""

    def __init__(self, name: str, placement: KvPlacement) -> None:
        self.name = name
        self.requested = time.monotonic()
        self.first = self.last = 0.0
        self.count = 0
        self.done = asyncio.get_running_loop().create_future()
        self._placement = placement

    def token(self, token: int) -> None:
        self.last = time.monotonic()
        self.count += 1
        if self.count == 1:
            self.first = self.last
            self._placement.prefilled(self.name, self.first)

    def item(self, item: object) -> None:
        self.token(0)

    def finish(self) -> None:
        self._placement.finish(self.name, self.count, time.monotonic())
        self.done.set_result(None)


class Reporter:
    """Publishes a rank's cached blocks to the router."""

    def __init__(self, worker: int, placement: KvPlacement) -> None:
        self._slot = worker, 0
        self._placement = placement

    def report(self, result: StepResult[Any], now_ms: float, seconds: float) -> None:
        for event in result.events:
            self._placement.apply(self._slot, event)
        self._placement.observe(self._slot, result.forward_pass)

    def rest(self) -> None:
        """Ignore the load."""


def prompt_of(session: ReplaySession) -> list[int]:
    """Return tokens that are equal where the block names are."""
    turn = session.turns[0]
    found: list[int] = []
    for name in turn.hash_ids:
        found += random.Random(name).choices(range(50_000), k=BLOCK)
    return found[: turn.input_tokens]


async def real(load: list[ReplaySession], workers: int, engine: EngineArgs) -> dict[str, float]:
    """Return the figures in real time."""
    placement = KvPlacement(RoutingConfig(block_size=engine.block_size), 42)
    ranks = []
    tasks = []
    for worker in range(workers):
        simulation: Simulation[Any] = Simulation(engine.limits(), engine.timing(), TokenSource(1 << 16, seed=worker))
        ranks.append(RankRunner(simulation, cast("Any", Reporter(worker, placement)), SystemClock()))
        placement.join(worker, 1, engine.num_gpu_blocks, engine.max_num_batched_tokens)
        tasks.append(asyncio.create_task(ranks[-1].run(_ended)))
    prompts = [prompt_of(session) for session in load]
    names = [packed_block_hashes(prompt, engine.block_size) for prompt in prompts]
    began, timed_replies = time.monotonic(), []
    for number, session in enumerate(load):
        turn = session.turns[0]
        await asyncio.sleep(max(0.0, began + (turn.at_ms or 0.0) / 1000 - time.monotonic()))
        timed_reply = TimedReply(turn.request_id, placement)
        slot = placement.place(PlacementRequest(timed_reply.name, turn.input_tokens, names[number]), time.monotonic())
        assert slot is not None
        requested = SimulationInput(prompts[number], turn.output_tokens, HASH_SEED, None)
        ranks[slot[0]].submit(requested, cast("Any", timed_reply))
        timed_replies.append(timed_reply)
    answers = asyncio.ensure_future(asyncio.gather(*(timed_reply.done for timed_reply in timed_replies)))
    ended, _ = await asyncio.wait([answers, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in ended:
        task.result()  # Raises the error of a rank.
    seconds = max(timed_reply.last for timed_reply in timed_replies) - began
    return {
        "TTFT ms": mean(1000 * (timed_reply.first - timed_reply.requested) for timed_reply in timed_replies),
        "ITL ms": mean(
            1000 * (timed_reply.last - timed_reply.first) / (timed_reply.count - 1) for timed_reply in timed_replies
        ),
        "tok/s": sum(timed_reply.count for timed_reply in timed_replies) / seconds,
    }


def _ended(reply: object) -> None:
    """Ignore the end, which the replies record."""


def virtual(load: list[ReplaySession], workers: int, engine: EngineArgs) -> dict[str, float]:
    """Return the figures in virtual time."""
    outcome = Scenario(sessions=load, workers=workers, router_mode="kv_router", engine=engine).run()
    found = summary_of(outcome, rows_of(outcome.flights))
    return {
        "TTFT ms": found["mean_ttft_ms"],
        "ITL ms": found["mean_tpot_ms"],
        "tok/s": found["output_throughput_tok_s"],
    }


def main() -> None:
    """Print both, and their differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--speedup", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, and no result file")
    given = parser.parse_args()
    if given.quick:
        given.requests //= 10
    shape = Shape(
        input_tokens=2048,
        output_tokens=100,
        requests=given.requests,
        shared_prefix_ratio=0.5,
        prefix_groups=32,
        request_rate=given.rate * given.speedup,
    )
    load, engine = sessions(shape), EngineArgs(speedup_ratio=given.speedup)
    lived, computed = asyncio.run(real(load, given.workers, engine)), virtual(load, given.workers, engine)
    print("| | real time | virtual time | |\n|---|---:|---:|---:|")
    for name, value in lived.items():
        print(f"| {name} | {value:,.2f} | {computed[name]:,.2f} | {100 * (computed[name] / value - 1):+.1f} % |")
    kept = {"workers": given.workers, "rate": given.rate, "requests": given.requests, "speedup": given.speedup}
    found = {**kept, "real": lived, "virtual": {name: computed[name] for name in lived}}
    print(write_result("replay_fidelity", found, is_whole=not given.quick))


if __name__ == "__main__":
    main()
