"""ReplayConfig: the flags of `python -m dynamo.replay` and `dynamo replay`."""

import math
from dataclasses import dataclass

import msgspec

from dynamo.core.config import option
from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.protocols.planner import Planner
from dynamo.replay.agentic_trace import plays_of, trajectories_of
from dynamo.replay.core_planner import CorePlanner, Lines, MetricFaults, planner_config
from dynamo.replay.engine import EngineArgs, engine_args, given
from dynamo.replay.load import ReplaySession
from dynamo.replay.modes import CACHE_AWARE, canonical, shared_settings
from dynamo.replay.plan import Bypass, Failure, PlannedRestart
from dynamo.replay.policies import Timetable, entry, load_thresholds
from dynamo.replay.public_traces import PUBLIC_FORMATS, read_public
from dynamo.replay.report import Objectives
from dynamo.replay.request_trace import sessions_of
from dynamo.replay.scenario import LoadSource, Scenario
from dynamo.replay.synthetic import Shape, sessions
from dynamo.replay.trace import read
from dynamo.replay.trace_lines import lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """Replays a trace or a synthetic load on simulated workers with the production router, in virtual time."""

    trace: str | None = option(None, "trace", None, "Trace files, JSONL or JSONL.GZ, separated by commas")
    trace_format: str = option(
        "mooncake",
        "--trace-format",
        None,
        "Trace format; dynamo: a frontend's request trace",
        choices=(
            "mooncake",
            "mooncake-delta",
            "agentic-mooncake",
            "applied-compute-agentic",
            "dynamo",
            *PUBLIC_FORMATS,
        ),
    )
    trace_block_size: int = option(512, "--trace-block-size", None, "Tokens per hash id")
    request_limit: int | None = option(None, "--request-limit", None, "Maximum number of sessions read from the trace")

    input_tokens: int | None = option(None, "--input-tokens", None, "Synthetic load: prompt tokens of a first turn")
    output_tokens: int | None = option(None, "--output-tokens", None, "Synthetic load: tokens of an answer")
    request_count: int | None = option(None, "--request-count", None, "Synthetic load: number of requests")
    turns_per_session: int = option(1, "--turns-per-session", None, "Synthetic load: requests per session")
    shared_prefix_ratio: float = option(
        0.0, "--shared-prefix-ratio", None, "Synthetic load: shared share of a first prompt, 0 to 1"
    )
    num_prefix_groups: int = option(0, "--num-prefix-groups", None, "Synthetic load: number of shared prefixes")
    inter_turn_delay_ms: float = option(
        0.0, "--inter-turn-delay-ms", None, "Synthetic load: milliseconds between an answer and the next turn"
    )
    arrival_interval_ms: float | None = option(
        None, "--arrival-interval-ms", None, "Synthetic load: constant arrival interval in ms"
    )
    request_rate: float | None = option(
        None, "--request-rate", None, "Synthetic load: mean requests per second (Poisson)"
    )

    replay_mode: str = option(
        "offline",
        "--replay-mode",
        None,
        "offline: simulate in virtual time; online: send requests to a frontend",
        choices=("offline", "online"),
    )
    url: str = option("http://localhost:8000", "--url", None, "Online: URL of the frontend")
    model_name: str | None = option(None, "--model-name", None, "Online: model name (default: the only model served)")
    connections: int = option(
        4096, "--connections", None, "Online: maximum concurrent requests; waiting counts as latency"
    )
    request_timeout_s: float = option(
        600.0, "--request-timeout-seconds", None, "Online: timeout in seconds without data"
    )
    prompt_token_ids: str = option(
        "1000-20000", "--prompt-token-ids", None, "Online: range of token ids in prompts", metavar="LOW-HIGH"
    )
    replay_concurrency: int | None = option(
        None, "--replay-concurrency", None, "Number of concurrent sessions (default: arrivals at recorded times)"
    )
    agentic_lanes: int | None = option(
        None, "--agentic-lanes", None, "Agentic trace: number of concurrent plays (default: recorded times)"
    )
    arrival_speedup_ratio: float = option(
        1.0, "--arrival-speedup-ratio", None, "Divides the arrival times of the trace"
    )
    max_sim_time_ms: float | None = option(
        None, "--max-sim-time-ms", None, "Time limit of the run in ms, even if requests are unanswered"
    )

    num_workers: int | None = option(None, "--num-workers", None, "Number of aggregated workers (default 1)")
    num_prefill_workers: int | None = option(
        None, "--num-prefill-workers", None, "Disaggregated: number of prefill workers"
    )
    num_decode_workers: int | None = option(
        None, "--num-decode-workers", None, "Disaggregated: number of decode workers"
    )
    extra_engine_args: str | None = option(
        None, "--extra-engine-args", None, "Settings of the simulated engine: JSON, or @file", metavar="JSON"
    )
    prefill_engine_args: str | None = option(
        None, "--prefill-engine-args", None, "Disaggregated: engine settings of prefill workers", metavar="JSON"
    )
    decode_engine_args: str | None = option(
        None, "--decode-engine-args", None, "Disaggregated: engine settings of decode workers", metavar="JSON"
    )
    conditional_disagg: bool = option(
        False,
        "--router-conditional-disagg",
        None,
        "Compute prompts with few uncached tokens on decode workers",
    )
    router_mode: str = option(
        "round_robin",
        "--router-mode",
        None,
        "round_robin, random, least_loaded, power_of_two, kv_router, balanced (not upstream) or preble",
        metavar="MODE",
    )
    router_config: str | None = option(
        None, "--router-config", None, "Settings of kv_router and balanced: JSON, or @file", metavar="JSON"
    )
    request_overhead_ms: float = option(
        0.0, "--request-overhead-ms", None, "Delay in ms of each request between its client and the router"
    )
    kv_event_lag_ms: float = option(0.0, "--kv-event-lag-ms", None, "Delay of KV events in ms")
    fail: list[str] = option(
        [],
        "--fail",
        None,
        "WORKER@SECONDS[+SECONDS]: time of a worker failure, and delay until a successor starts",
        metavar="W@T[+R]",
    )
    restart: list[str] = option(
        [], "--restart", None, "WORKER@SECONDS: drain the worker and start a successor", metavar="W@T"
    )
    scale_at: list[str] = option(
        [], "--scale-at", None, "SECONDS=WORKERS or SECONDS=PREFILL/DECODE: worker counts from a time on", metavar="T=N"
    )
    scale_load: str | None = option(
        None, "--scale-load", None, "Scale workers by load: `on`, or thresholds as JSON", metavar="JSON"
    )
    planner_config: str | None = option(
        None,
        "--planner-config",
        None,
        "Scale workers by the planner: its configuration, a file or JSON",
        metavar="JSON",
    )
    planner_record: str | None = option(
        None, "--planner-record", None, "File of the planner's decision record, for `dynamo plan`"
    )
    planner_metrics_delay_s: float = option(
        0.0, "--planner-metrics-delay", None, "Age in seconds of the metrics that the planner receives"
    )
    planner_metrics_loss: float = option(
        0.0, "--planner-metrics-loss", None, "Probability, 0 to 1, that a planner tick receives no metrics"
    )
    worker_speed: list[str] = option(
        [], "--worker-speed", None, "WORKER=FACTOR: speed of a worker relative to the others", metavar="W=F"
    )
    seed: int = option(42, "--arrival-seed", None, "Random seed", aliases=("--seed",))

    sla_ttft_ms: float | None = option(None, "--sla-ttft-ms", None, "Objective of goodput: maximum TTFT in ms")
    sla_itl_ms: float | None = option(None, "--sla-itl-ms", None, "Objective of goodput: maximum ITL in ms")
    sla_e2e_ms: float | None = option(None, "--sla-e2e-ms", None, "Objective of goodput: maximum request latency in ms")

    compare: list[str] = option(
        [],
        "--compare",
        None,
        "Router mode to compare with the first, with settings after colons",
        metavar="MODE[:KEY=VALUE]",
    )
    report_json: str | None = option(None, "--report-json", None, "File of the JSON report; - for the terminal")
    report_jsonl: str | None = option(None, "--report-jsonl", None, "File of request rows, JSONL")
    report_trace: str | None = option(
        None, "--report-request-trace", None, "File of the requests in a frontend's request trace format"
    )
    report_html: str | None = option(None, "--report-html", None, "File of an HTML page with plots")
    capture_per_request: bool = option(False, "--capture-per-request", None, "Include requests in the report")
    telemetry: bool = option(False, "--telemetry", None, "Include the activity of each worker in the report")
    telemetry_interval_ms: float = option(
        1000.0, "--telemetry-interval-ms", None, "Interval of the worker activity in ms"
    )
    progress: bool = option(True, "--progress", None, "Show a progress bar on a terminal")

    def __post_init__(self) -> None:
        made_up = (self.input_tokens, self.output_tokens, self.request_count)
        if self.trace and any(value is not None for value in made_up):
            raise ConfigError("a trace and --input-tokens, --output-tokens, --request-count are mutually exclusive")
        if not self.trace and None in made_up:
            raise ConfigError("missing load: pass a trace, or --input-tokens, --output-tokens and --request-count")
        if not self.trace:
            ways = (self.arrival_interval_ms, self.request_rate, self.replay_concurrency)
            if sum(way is not None for way in ways) != 1:
                raise ConfigError(
                    "exactly one of --arrival-interval-ms, --request-rate and --replay-concurrency is required"
                )
        for flag, number in (
            ("--trace-block-size", self.trace_block_size),
            ("--request-limit", 1 if self.request_limit is None else self.request_limit),
        ):
            if number < 1:
                raise ConfigError(f"{flag} {number}: expected 1 or more")
        if self.telemetry_interval_ms <= 0:
            raise ConfigError(f"--telemetry-interval-ms {self.telemetry_interval_ms:g}: expected more than 0")
        if self.kv_event_lag_ms and canonical(self.router_mode) not in CACHE_AWARE:
            raise ConfigError("--kv-event-lag-ms: requires a router mode that uses KV events")
        if sum(map(bool, (self.scale_at, self.scale_load, self.planner_config))) > 1:
            raise ConfigError("--scale-at, --scale-load and --planner-config are mutually exclusive")
        if self.planner_config is None and (self.planner_record is not None or self.planner_faults() != MetricFaults()):
            raise ConfigError("--planner-record and --planner-metrics-…: require --planner-config")
        self._check_pools()
        if self.replay_mode == "online":
            self._check_online()

    def _check_pools(self) -> None:
        pools = (self.num_prefill_workers, self.num_decode_workers)
        if (pools[0] is None) != (pools[1] is None):
            raise ConfigError("--num-prefill-workers and --num-decode-workers must be set together")
        if self.is_disaggregated and self.num_workers is not None:
            raise ConfigError("--num-workers: not allowed with --num-prefill-workers and --num-decode-workers")
        args = (self.prefill_engine_args, self.decode_engine_args)
        if (args[0] is None) != (args[1] is None):
            raise ConfigError("--prefill-engine-args and --decode-engine-args must be set together")
        if args[0] is not None and self.extra_engine_args is not None:
            raise ConfigError(
                "--extra-engine-args and --prefill-engine-args, --decode-engine-args are mutually exclusive"
            )
        if not self.is_disaggregated and (args[0] is not None or self.conditional_disagg):
            raise ConfigError("disaggregation flags require --num-prefill-workers and --num-decode-workers")

    def _check_online(self) -> None:
        """Raise `ConfigError` for flags that describe a simulated cluster."""
        if self.trace is None and self.input_tokens is None:
            return
        for flag, is_given in (
            ("--num-workers", self.num_workers is not None),
            ("--num-prefill-workers", self.is_disaggregated),
            ("--extra-engine-args", self.extra_engine_args is not None),
            ("--router-mode", self.router_mode != "round_robin"),
            ("--router-config", self.router_config is not None),
            ("--kv-event-lag-ms", self.kv_event_lag_ms > 0),
            ("--request-overhead-ms", self.request_overhead_ms > 0),
            ("--fail", bool(self.fail)),
            ("--worker-speed", bool(self.worker_speed)),
            ("--restart", bool(self.restart)),
            ("--scale-at", bool(self.scale_at)),
            ("--scale-load", self.scale_load is not None),
            ("--planner-config", self.planner_config is not None),
            ("--compare", bool(self.compare)),
        ):
            if is_given:
                raise ConfigError(f"{flag}: not allowed with --replay-mode online, which uses a running cluster")
        if self.connections < 1:
            raise ConfigError(f"--connections {self.connections}: expected 1 or more")
        if not self.request_timeout_s > 0:
            raise ConfigError(f"--request-timeout-seconds {self.request_timeout_s:g}: expected more than 0")
        self.token_ids()

    @property
    def is_disaggregated(self) -> bool:
        """Return whether prefill and decode run on different workers."""
        return self.num_prefill_workers is not None

    def token_ids(self) -> range:
        """Return the token ids from which online prompts are made."""
        low, _, high = self.prompt_token_ids.partition("-")
        try:
            found = range(int(low), int(high) + 1)
        except ValueError:
            found = range(0)
        if len(found) < 2 or found.start < 0:
            raise ConfigError(f"--prompt-token-ids {self.prompt_token_ids}: expected LOW-HIGH")
        return found

    def objectives(self) -> Objectives:
        """Return the latency objectives of goodput."""
        return Objectives(self.sla_ttft_ms, self.sla_itl_ms, self.sla_e2e_ms)

    def described(self, requests: int) -> dict[str, str]:
        """Return what was run, for the page: the load, the cluster and the objectives."""
        rate = f"{self.replay_concurrency} sessions at once" if self.replay_concurrency else "arrivals"
        if self.arrival_speedup_ratio != 1:
            rate += f" x{self.arrival_speedup_ratio:g}"
        load = self.trace or f"synthetic, {self.input_tokens} prompt tokens, {self.output_tokens} output tokens"
        found = {"load": f"{load}: {requests:,} requests, {rate}"}
        if self.replay_mode == "online":
            found["cluster"] = self.url
        else:
            workers = f"{self.workers} workers"
            if self.is_disaggregated:
                workers = f"{self.num_prefill_workers} prefill and {self.workers} decode workers"
            engine = self.decode_engine_args or self.extra_engine_args or "the mocker's defaults"
            found["cluster"] = f"{workers}, engine: {engine}"
            modes = ", ".join([self.router_mode, *self.compare])
            found["router"] = f"{modes} {self.router_config or ''}".strip()
        limits = (("TTFT", self.sla_ttft_ms), ("ITL", self.sla_itl_ms), ("latency", self.sla_e2e_ms))
        objectives = [f"{name} {limit:g} ms" for name, limit in limits if limit is not None]
        found["objectives"] = ", ".join(objectives) or "none"
        faults = [*(f"--fail {one}" for one in self.fail), *(f"--restart {one}" for one in self.restart)]
        scaling = [*(f"--scale-at {one}" for one in self.scale_at)]
        for flag, value in (("--scale-load", self.scale_load), ("--planner-config", self.planner_config)):
            scaling += [f"{flag} {value}"] if value else []
        more = {"faults": ", ".join(faults), "scaling": ", ".join(scaling)}
        return found | {name: value for name, value in more.items() if value}

    def engine(self) -> EngineArgs:
        """Return the simulated engine of decode or aggregated workers."""
        if self.decode_engine_args is not None:
            return engine_args(self.decode_engine_args, "--decode-engine-args")
        return engine_args(self.extra_engine_args)

    def prefill_engine(self) -> EngineArgs:
        """Return the simulated engine of prefill workers."""
        if self.prefill_engine_args is None:
            return self.engine()
        return engine_args(self.prefill_engine_args, "--prefill-engine-args")

    def planner_faults(self) -> MetricFaults:
        """Return the faults of the planner's metrics; without a seed of their own unless there are any."""
        seed = {"seed": self.seed} if self.planner_metrics_loss else {}
        return MetricFaults(delay_s=self.planner_metrics_delay_s, loss=self.planner_metrics_loss, **seed)

    def planner(self) -> Planner | None:
        """Return a new planner; None without scaling flags."""
        if self.planner_config is not None:
            config = planner_config(self.planner_config, is_disaggregated=self.is_disaggregated)
            engines = {EngineRole.AGGREGATED: self.engine()}
            if self.is_disaggregated:
                engines = {EngineRole.PREFILL: self.prefill_engine(), EngineRole.DECODE: self.engine()}
            sink = None if self.planner_record is None else Lines(self.planner_record).write
            return CorePlanner(config, engines, self.planner_faults(), sink)
        if self.scale_load is not None:
            return load_thresholds(self.scale_load)
        return Timetable([entry(words) for words in self.scale_at]) if self.scale_at else None

    def source(self) -> LoadSource:
        """Return the load, read from a trace or generated."""
        if self.trace is None:
            return LoadSource(self._made_up(), self.trace_block_size)
        paths = self.trace.split(",")
        if self.trace_format in {"agentic-mooncake", "applied-compute-agentic"}:
            if self.trace_format == "agentic-mooncake":
                plays, block_tokens = plays_of(lines(paths, self.trace_format))
            else:
                plays, block_tokens = (
                    trajectories_of(lines(paths, self.trace_format), self.trace_block_size),
                    self.trace_block_size,
                )
            plays = plays[: self.request_limit]
            return LoadSource([session for play in plays for session in play.sessions], block_tokens, plays)
        if self.trace_format == "dynamo":
            found, block_tokens = sessions_of(lines(paths, self.trace_format))
        elif self.trace_format in PUBLIC_FORMATS:
            found, block_tokens = read_public(paths, self.trace_format, self.trace_block_size)
        else:
            found, block_tokens = read(paths, self.trace_format, self.trace_block_size), self.trace_block_size
        return LoadSource(found[: self.request_limit], block_tokens)

    def _made_up(self) -> list[ReplaySession]:
        assert self.input_tokens is not None
        assert self.output_tokens is not None
        assert self.request_count is not None
        shape = Shape(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            requests=self.request_count,
            turns=self.turns_per_session,
            shared_prefix_ratio=self.shared_prefix_ratio,
            prefix_groups=self.num_prefix_groups,
            inter_turn_delay_ms=self.inter_turn_delay_ms,
            arrival_interval_ms=self.arrival_interval_ms,
            request_rate=self.request_rate,
            block_tokens=self.trace_block_size,
            seed=self.seed,
        )
        return sessions(shape)

    def scenarios(self, source: LoadSource) -> dict[str, Scenario]:
        """Return the scenarios to run, by name."""
        shared = given(self.router_config, "--router-config")
        runs: dict[str, tuple[str, dict[str, object]]] = {self.router_mode: (self.router_mode, {})}
        for words in self.compare:
            mode, *pairs = words.split(":")
            runs[words] = mode, dict(map(_setting, pairs))
        settings = shared_settings(shared, runs)
        return {name: self._scenario(source, mode, settings[name]) for name, (mode, _) in runs.items()}

    def _scenario(self, source: LoadSource, mode: str, settings: dict[str, object]) -> Scenario:
        self.planner()  # Reports invalid planner flags before any run.
        prefill = None if self.prefill_engine_args is None else self.prefill_engine()
        return Scenario(
            sessions=source.sessions,
            plays=source.plays,
            workers=self.workers,
            prefill_workers=self.num_prefill_workers,
            prefill_engine=prefill,
            bypass=Bypass() if self.conditional_disagg else None,
            router_mode=mode,
            router_settings=settings,
            engine=self.engine(),
            concurrency=self.replay_concurrency,
            lanes=self.agentic_lanes,
            speedup=self.arrival_speedup_ratio,
            block_tokens=source.block_tokens,
            failures=tuple(failure(words) for words in self.fail),
            restarts=tuple(restart(words) for words in self.restart),
            planner=self.planner,
            gpus_per_worker=self._gpus(),
            event_lag_ms=self.kv_event_lag_ms,
            overhead_ms=self.request_overhead_ms,
            speeds=dict(speed(words) for words in self.worker_speed),
            interval_ms=self.telemetry_interval_ms,
            max_sim_time_ms=self.max_sim_time_ms,
            seed=self.seed,
        )

    def _gpus(self) -> tuple[int, int]:
        """Return the GPUs of a prefill worker, and of a decode or aggregated worker."""
        if self.planner_config is None:
            return 1, 1
        config = planner_config(self.planner_config, is_disaggregated=self.is_disaggregated)
        return config.prefill_engine_num_gpu or 1, config.decode_engine_num_gpu or 1

    @property
    def workers(self) -> int:
        """Return the number of decode or aggregated workers."""
        return self.num_decode_workers or (1 if self.num_workers is None else self.num_workers)


def _setting(pair: str) -> tuple[str, object]:
    name, _, text = pair.partition("=")
    try:
        return name, msgspec.json.decode(text)
    except msgspec.DecodeError:
        return name, text


def failure(words: str) -> Failure:
    """Parse `3@60+20`: worker 3 fails at 60 s, and its successor starts 20 s later."""
    worker, _, times = words.partition("@")
    at, plus, later = times.partition("+")
    try:
        return Failure(float(at) * 1000, int(worker), float(later) * 1000 if plus else None)
    except ValueError:
        raise ConfigError(f"--fail {words}: expected WORKER@SECONDS or WORKER@SECONDS+SECONDS") from None


def speed(words: str) -> tuple[int, float]:
    """Parse `3=0.5`: worker 3 takes twice the time of the others."""
    worker, _, factor = words.partition("=")
    try:
        found = int(worker), float(factor)
    except ValueError:
        found = -1, 0.0
    if found[0] < 0 or not 0 < found[1] < math.inf:
        raise ConfigError(f"--worker-speed {words}: expected WORKER=FACTOR, the factor above 0")
    return found


def restart(words: str) -> PlannedRestart:
    """Parse `3@60`: worker 3 is restarted at 60 s."""
    worker, _, at = words.partition("@")
    try:
        return PlannedRestart(float(at) * 1000, int(worker))
    except ValueError:
        raise ConfigError(f"--restart {words}: expected WORKER@SECONDS") from None
