"""Cost of the KV index and of a routing decision: ours against the released `RadixTree` through its bindings, in one
run.

    python -m benchmarks.router [--rounds 3] [--big]

Both run the same cases (`router_cases.py`), each in a process of its own, alternating. Figures are processor time. A
call of the released index includes a thread switch and the conversion of its argument, which a router inside its
process would not need: look-ups are shown with and without that cost (of a look-up without a result). Its events are
JSON, the only accepted form; ours are decoded objects, because the event plane decodes once for all subscribers.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer import PeerMissing, ensure_peer, peer_home
from benchmarks.report import write_result
from dynamo.core.config import environ, exit_on_config_error, load, option

HERE = Path(__file__).parent
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBench:
    """Index and decisions."""

    rounds: int = option(3, "--rounds", None, "Turns that both take; figures are medians")
    big: bool = option(False, "--big", None, "Ten million blocks too: some 2 GB and a few minutes")
    quick: bool = option(False, "--quick", None, "One round, and no results file")


def run(python: str, adapter: str, config: RouterBench) -> dict[str, float]:
    """Run one round of one implementation."""
    command = [python, str(HERE / "router_cases.py"), str(HERE / adapter), *(["--big"] if config.big else [])]
    variables = dict(environ())
    if "peer" in adapter:
        variables["HOME"] = os.path.join(peer_home(), "home")
        variables.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{adapter} failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    config = load(RouterBench, sys.argv[1:])
    adapters = {"ours": (sys.executable, "router_ours.py")}
    try:
        adapters["theirs"] = (ensure_peer(), "router_peer.py")
    except PeerMissing as error:
        print(f"ours alone: {error}")
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in adapters}
    for number in range(1 if config.quick else config.rounds):
        for name, (python, adapter) in adapters.items():
            print(f"round {number + 1}: {name} …", file=sys.stderr, flush=True)
            turns[name].append(run(python, adapter, config))
    medians = {
        name: {case: statistics.median(turn[case] for turn in made) for case in made[0]} for name, made in turns.items()
    }
    theirs = medians.get("theirs", {})
    print(f"| {'case':<72} | {'ours':>9} | {'theirs':>9} | ours/theirs |")
    print(f"|{'-' * 74}|{'-' * 10}:|{'-' * 10}:|{'-' * 12}:|")
    for case, value in medians["ours"].items():
        other = theirs.get(case)
        ratio = f"{value / other:.2f}" if other else ""
        print(f"| {case:<72} | {value:9.2f} | {'' if other is None else f'{other:.2f}':>9} | {ratio:>11} |")
    print(write_result("router", {"medians": medians, "turns": turns}, is_whole=not config.quick))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
