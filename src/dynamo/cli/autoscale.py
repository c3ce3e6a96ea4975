"""Autoscaling of `dynamo serve`: follows the planner's decisions, and starts and stops worker processes for them."""

import asyncio
import contextlib
import dataclasses
import itertools
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.cli.graph import PREFILL, WORKER, Graph
from dynamo.cli.replicas import DevicePool, KillReplica, Replicas, StartReplica
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.supervisor import Process, Supervisor

if TYPE_CHECKING:
    from dynamo.planner.config.planner_config import PlannerConfig

FOLLOW_S = 0.25
"""Interval at which the decisions are read: small compared with the start of a worker."""
DRAIN_S = 60.0
"""Time that a worker has to complete its requests: its own grace period and its limit of 30 s, and as much again."""
DEVICES_S = 10.0
NAMESPACE = "dynamo"
INTERVAL_S = 5
"""Interval of decisions; the first follows when the planner has measured a few forward passes."""
METHODS = ("scaling_policy", "enable_load_scaling", "enable_throughput_scaling")
"""Settings that choose how the planner scales."""

REASONS = {
    "scale_up": "the load exceeds what the present workers can serve within the targets",
    "scale_down": "fewer workers are sufficient for the load",
    "scale": "the predicted traffic requires it",
    "set_lower_bound": "the predicted traffic requires it",
    "reconcile_clamped_to_floor": "the minimum number of workers",
    "reconcile_clamped_to_ceiling": "the maximum number of workers",
    "gpu_budget_reconcile": "the maximum number of workers",
    "override_by_user_plugin": "a plugin of the planner requires it",
}
"""Reasons of the planner that change numbers, in words."""


def planner_settings(
    given: Mapping[str, Any], *, workers: int, prefill_workers: int, max_workers: int, namespace: str
) -> dict[str, Any]:
    """Return the planner's settings: the given ones, and for the rest those of one machine.

    The default policy is `forecast`: in the first minutes of a process it follows the load sooner than load scaling, whose
    estimates need observations of an overload, and it adds several workers at once. A worker counts as one GPU, so that
    `max_gpu_budget` is the number of workers. Raises `ConfigError` for settings that contradict the command line.
    """
    fixed = {
        "environment": "virtual",
        "mode": "disagg" if prefill_workers else "agg",
        "namespace": namespace,
    }
    for name, value in fixed.items():
        if given.get(name, value) != value:
            flag = " (--namespace)" if name == "namespace" else ""
            raise ConfigError(f"{name}: {given[name]!r}: must be {value!r} or absent with dynamo serve{flag}")
    if given.get("min_endpoint") == 0:
        raise ConfigError("min_endpoint: 0: must be at least 1 with dynamo serve")
    floors = {"prefill_min_endpoint": prefill_workers, "decode_min_endpoint": workers}
    chooses_method = given.get("optimization_target", "sla") != "sla" or any(name in given for name in METHODS)
    defaults: dict[str, Any] = {
        "optimization_target": "sla",
        **({} if chooses_method else {"scaling_policy": "forecast"}),
        "pre_deployment_sweeping_mode": "none",
        "load_adjustment_interval_seconds": INTERVAL_S,
        "control_api_port": 0,
        "live_dashboard_port": 0,
        "report_interval_hours": None,
        **(floors if prefill_workers else {"min_endpoint": workers}),
    }
    budget = given.get("max_gpu_budget", max_workers)
    if isinstance(budget, int) and not 0 <= budget <= max_workers:  # Any other type is refused by the settings' reader.
        budget = max_workers
    counted = {"decode_engine_num_gpu": 1, **({"prefill_engine_num_gpu": 1} if prefill_workers else {})}
    return {**defaults, **given, **fixed, **counted, "max_gpu_budget": budget}


def planner_variables(config: "PlannerConfig") -> dict[str, str]:
    """Return the environment of the settings that its JSON form omits: addresses, credentials and the namespace."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        name, value = field.metadata.get("env"), getattr(config, field.name)
        if name is None or value is None or field.metadata.get("is_dumped", True):
            continue
        found[name] = urllib.parse.urlencode(value) if isinstance(value, dict) else str(value)
    return found


def visible_devices(variables: Mapping[str, str]) -> list[str]:
    """Return the GPUs that workers may use: those of `CUDA_VISIBLE_DEVICES`, otherwise those that nvidia-smi lists.

    As for CUDA, the list of the variable ends at the first invalid entry. A repeated one is the same GPU.
    """
    named = variables.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        words = itertools.takewhile(lambda word: word and not word.startswith("-"), map(str.strip, named.split(",")))
        return list(dict.fromkeys(words))
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],  # noqa: S607 -- found on PATH, as in containers
            capture_output=True,
            timeout=DEVICES_S,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


class PlannerFollower:
    """Thread that reads the planner's decisions from discovery, and reports which one was carried out."""

    def __init__(self, discovery: str, namespace: str) -> None:
        self._discovery = discovery
        self._namespace = namespace
        self._lock = threading.Lock()
        self._decision: tuple[int, int, int] | None = None
        self._taken: tuple[int, int, int] | None = None
        self._done: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planner decisions", daemon=True)

    def start(self) -> None:
        """Start to follow."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; its records leave discovery."""
        self._end.set()
        self._thread.join(5.0)

    def take(self) -> dict[str, int] | None:
        """Return the numbers of a decision that was not taken yet; None without one."""
        with self._lock:
            if self._decision is None or self._decision == self._taken:
                return None
            self._taken = self._decision
        prefill, decode, _ = self._taken
        return {role: number for role, number in ((PREFILL, prefill), (WORKER, decode)) if number >= 0}

    def complete(self) -> None:
        """Report that the processes of the last decision taken were started and stopped."""
        with self._lock:
            self._done = None if self._taken is None else self._taken[2]

    def _run(self) -> None:
        asyncio.run(self._follow())

    async def _follow(self) -> None:
        from dynamo.llm.virtual_connector import SCALED, PlannerState
        from dynamo.runtime.discovery.file import FileDiscovery

        discovery = FileDiscovery(self._discovery)
        state, reported = PlannerState(discovery, self._namespace), None
        try:
            with contextlib.suppress(
                OSError, DynamoException
            ):  # The decisions of an earlier graph are not those of this one.
                await state.clear()
            while not self._end.is_set():
                with contextlib.suppress(OSError, DynamoException):  # Tried again; the workers stay as they are.
                    decision, _ = await state.read()
                    with self._lock:
                        if not decision.is_unset:
                            self._decision = (
                                decision.num_prefill_workers,
                                decision.num_decode_workers,
                                decision.decision_id,
                            )
                        done = self._done
                    if done is not None and done != reported:
                        await state.write(SCALED, done)
                        reported = done
                await asyncio.sleep(FOLLOW_S)
        finally:
            await discovery.close()


class Autoscaler:
    """The worker processes of one graph whose number a planner chooses."""

    def __init__(
        self,
        graph: Graph,
        supervisor: Supervisor,
        follower: PlannerFollower,
        *,
        max_workers: int,
        devices: DevicePool | None = None,
    ) -> None:
        self._template = graph.template
        self.processes: dict[str, Process] = {}
        """Processes that were started, by name; a crashed one is started again as it was."""
        self._supervisor = supervisor
        self._follower = follower
        self.replicas = Replicas(graph.roles, limit=max_workers, drain_s=DRAIN_S, devices=devices)
        self._is_complete = True

    def start(self) -> None:
        """Start the first workers."""
        self._apply()

    def step(self) -> dict[str, tuple[int, int]]:
        """Carry out a new decision, and what an earlier one still requires; return the changed numbers by role."""
        before, taken = self.replicas.wanted, self._follower.take()
        changed: dict[str, tuple[int, int]] = {}
        if taken is not None:
            after = self.replicas.want(taken)
            changed = {role: (before[role], after[role]) for role in after if before[role] != after[role]}
            self._is_complete = False
        self._apply()
        if not self._is_complete and self.replicas.is_settled:
            self._is_complete = True
            self._follower.complete()
        return changed

    def _apply(self) -> None:
        for action in self.replicas.reconcile(time.monotonic()):
            match action:
                case StartReplica():
                    process = self._template.worker(action.role, action.number, action.devices)
                    self.processes[process.name] = process
                    self._supervisor.start(process)
                case KillReplica():
                    self._supervisor.kill([action.name])
                    self.replicas.exited(action.name)
                case _:
                    if not self._supervisor.request_stop(action.name):
                        self.replicas.exited(action.name)


def explain(change: Mapping[str, tuple[int, int]], decisions: Sequence[Mapping[str, Any]]) -> str:
    """Return the line for the terminal; `decisions` are the planner's last ones, as `GET /v1/planner` shows them."""
    numbers = " and ".join(
        f"from {before} to {after} {'prefill ' if role == PREFILL else ''}worker{'' if after == 1 else 's'}"
        for role, (before, after) in change.items()
    )
    made = next((one for one in reversed(decisions) if one.get("outcome") == "accepted"), None)
    return f"Scaling {numbers}{'' if made is None else f': {cause_of(made)}'}"


def cause_of(decision: Mapping[str, Any]) -> str:
    """Return why a decision was made: its reason in words, and the figures on which it is based."""
    reasons = [str(decision.get(name, "")) for name in ("load_reason", "throughput_reason")]
    words = next((REASONS[one] for one in reasons if one in REASONS), f"the planner's reason is {reasons[0]}")
    figures = [
        f"{label} {decision[name]:.0f} ms"
        for name, label in (("estimated_ttft_ms", "estimated TTFT"), ("estimated_itl_ms", "estimated ITL"))
        if isinstance(decision.get(name), int | float)
    ]
    clamped = [str(one) for one in decision.get("clamped", [])]
    return "; ".join([words, *figures, *clamped])
