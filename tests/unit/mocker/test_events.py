"""The results of a step are published once, to the routers and to the metrics."""

from typing import Any

from dynamo.core.metrics import MetricsRegistry
from dynamo.mocker.events import EngineMetrics, SimulatedStepReporter
from dynamo.mocker.simulation.scheduler import RankLimits, Simulation
from dynamo.mocker.simulation.sglang import SglangSimulation
from dynamo.mocker.simulation.timing import Timing
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.kv_events import KvEvent, Stored
from dynamo.protocols.load import ForwardPass, WorkerLoad


class Host:
    def __init__(self) -> None:
        self.metrics = MetricsRegistry()
        self.worker_id = 1
        self.tiers: set[str] = set()
        self.events: list[tuple[KvEvent, int]] = []
        self.loads: list[WorkerLoad] = []
        self.passes: list[tuple[ForwardPass, int]] = []

    def publish_kv_event(self, event: KvEvent, dp_rank: int = 0, tier: str = "device") -> None:
        self.events.append((event, dp_rank))
        self.tiers.add(tier)

    def publish_load(self, load: WorkerLoad) -> None:
        self.loads.append(load)

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        self.passes.append((passed, dp_rank))

    def fail(self, error: BaseException) -> None:
        raise error


def made(num_blocks: int = 64, dp_rank: int = 0) -> tuple[Host, Simulation[Any], SimulatedStepReporter]:
    host: Any = Host()
    limits = RankLimits(num_blocks=num_blocks, block_tokens=4)
    simulation = Simulation[Any](limits, Timing(), TokenSource(100, seed=1), dp_rank)
    return host, simulation, SimulatedStepReporter(host, EngineMetrics(host.metrics, "0", "m"), simulation)


def value(host: Host, name: str) -> float:
    line = next(line for line in host.metrics.render().splitlines() if line.startswith(f"{name}{{"))
    return float(line.rsplit(" ", 1)[1])


def test_reporter_publishes_blocks_and_load_with_its_rank() -> None:
    host, simulation, reporter = made(dp_rank=3)
    simulation.submit(None, [1] * 9, 2, 0)
    reporter.report(simulation.step(0), 20, 20)
    ((event, dp_rank),) = host.events
    assert isinstance(event, Stored)
    assert dp_rank == host.loads[0].dp_rank == 3


def test_idle_rank_reports_blocks_that_it_stored_since_its_last_step() -> None:
    host: Any = Host()
    simulation = SglangSimulation[Any](RankLimits(64, 4, engine_type="sglang"), Timing(), TokenSource(100, seed=1))
    reporter = SimulatedStepReporter(host, EngineMetrics(host.metrics, "0", "m"), simulation)
    prompt = simulation.submit(None, [1] * 9, 1, 0, stays=True)
    reporter.report(simulation.step(0), 20, 20)
    assert not host.events, "a prompt for another worker is inserted when that worker has it"
    simulation.let_go(prompt)
    reporter.rest()
    reporter.rest()
    ((event, _),) = host.events
    assert isinstance(event, Stored)
    assert len(event.blocks) == 2


def test_reporter_publishes_forward_pass_metrics_with_its_rank() -> None:
    host, simulation, reporter = made(dp_rank=3)
    simulation.submit(None, [1] * 9, 2, 0)
    result = simulation.step(0)
    reporter.report(result, 20, 20)
    assert host.passes == [(result.forward_pass, 3)]


def test_latency_metrics_measure_first_token_from_arrival_and_later_tokens_from_each_other() -> None:
    host, simulation, reporter = made()
    simulation.submit(None, [1] * 9, 3, 1000)
    for now in (1250, 1300, 1400):
        reporter.report(simulation.step(now), now, 0.05)
    assert value(host, "vllm:time_to_first_token_seconds_count") == 1
    assert value(host, "vllm:time_to_first_token_seconds_sum") == 0.25
    assert value(host, "vllm:inter_token_latency_seconds_count") == 2
    assert round(value(host, "vllm:inter_token_latency_seconds_sum"), 6) == 0.1
    assert value(host, "vllm:e2e_request_latency_seconds_sum") == 0.4


def test_preempted_request_is_counted_with_one_first_token() -> None:
    host, simulation, reporter = made(num_blocks=4)
    for start in (0, 50):
        simulation.submit(None, list(range(start, start + 7)), 8, 0)
    while not simulation.is_idle:
        reporter.report(simulation.step(0), 0, 0)
    assert value(host, "vllm:num_preemptions_total") == 1
    assert value(host, "vllm:time_to_first_token_seconds_count") == 2
    assert value(host, "vllm:e2e_request_latency_seconds_count") == 2


def test_gauges_report_the_current_load() -> None:
    host, simulation, reporter = made()
    for _ in range(2):
        simulation.submit(None, [1] * 30, 3, 0)
    reporter.report(simulation.step(0), 0, 0)
    assert value(host, "vllm:num_requests_running") == 2
    assert value(host, "vllm:num_requests_waiting") == 0
    assert value(host, "vllm:kv_cache_usage_perc") == value(host, "vllm:gpu_cache_usage_perc") == 9 / 64
