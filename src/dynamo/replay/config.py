"""ReplayConfig: the flags of `python -m dynamo.replay` and `dynamo replay` (control-plane.md §6.4)."""

from dataclasses import dataclass

import msgspec

from dynamo.core.config import option
from dynamo.core.errors import ConfigError
from dynamo.protocols.planner import Planner
from dynamo.replay.agentic_trace import plays_of, trajectories_of
from dynamo.replay.engine import EngineArgs, engine_args, given
from dynamo.replay.load import Session
from dynamo.replay.modes import CACHE_AWARE, canonical
from dynamo.replay.plan import Bypass, Failure, Restart
from dynamo.replay.policies import Timetable, entry, load_thresholds
from dynamo.replay.report import Objectives
from dynamo.replay.request_trace import sessions_of
from dynamo.replay.scenario import Scenario, Source
from dynamo.replay.synthetic import Shape, sessions
from dynamo.replay.trace import lines, read


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """Replays a trace, or a load that is made up, on simulated workers behind the production router, in virtual time."""

    trace: str | None = option(None, "trace", None, "The trace, JSONL or JSONL.GZ; several with commas between")
    trace_format: str = option(
        "mooncake",
        "--trace-format",
        None,
        "What its rows are; dynamo: a frontend's request trace",
        choices=("mooncake", "mooncake-delta", "agentic-mooncake", "applied-compute-agentic", "dynamo"),
    )
    trace_block_size: int = option(512, "--trace-block-size", None, "Tokens that one hash id stands for")
    request_limit: int | None = option(None, "--request-limit", None, "Only the trace's first so many sessions")

    input_tokens: int | None = option(None, "--input-tokens", None, "Without a trace: tokens of a prompt")
    output_tokens: int | None = option(None, "--output-tokens", None, "… of an answer")
    request_count: int | None = option(None, "--request-count", None, "… how many requests")
    turns_per_session: int = option(1, "--turns-per-session", None, "… how many of them in one conversation")
    shared_prefix_ratio: float = option(0.0, "--shared-prefix-ratio", None, "… how much of a prompt others have too")
    num_prefix_groups: int = option(0, "--num-prefix-groups", None, "… how many such beginnings there are")
    inter_turn_delay_ms: float = option(0.0, "--inter-turn-delay-ms", None, "… the pause before the next turn")
    arrival_interval_ms: float | None = option(None, "--arrival-interval-ms", None, "… one every so many ms")
    request_rate: float | None = option(None, "--request-rate", None, "… so many a second on average, at random")

    replay_mode: str = option(
        "offline", "--replay-mode", None, "In virtual time, or asked of a frontend", choices=("offline", "online")
    )
    url: str = option("http://localhost:8000", "--url", None, "Online: the frontend")
    model_name: str | None = option(None, "--model-name", None, "… the model; without it, the only one that it serves")
    connections: int = option(4096, "--connections", None, "… how many requests at once; others wait, and that counts")
    request_timeout_s: float = option(600.0, "--request-timeout-seconds", None, "… the longest silence of an answer")
    prompt_token_ids: str = option(
        "1000-20000", "--prompt-token-ids", None, "… which token ids prompts are made of", metavar="LOW-HIGH"
    )
    replay_concurrency: int | None = option(
        None, "--replay-concurrency", None, "So many sessions at once, whatever their times; without it, at their times"
    )
    agentic_lanes: int | None = option(
        None, "--agentic-lanes", None, "Of an agentic trace: so many plays at once, whatever their times"
    )
    arrival_speedup_ratio: float = option(1.0, "--arrival-speedup-ratio", None, "Divides the times of the trace")
    max_sim_time_ms: float | None = option(None, "--max-sim-time-ms", None, "When it is over, done or not")

    num_workers: int | None = option(None, "--num-workers", None, "Workers (default 1)")
    num_prefill_workers: int | None = option(
        None, "--num-prefill-workers", None, "Disaggregated: who compute prompts …"
    )
    num_decode_workers: int | None = option(None, "--num-decode-workers", None, "… and who answer")
    extra_engine_args: str | None = option(
        None, "--extra-engine-args", None, "The simulated engine: JSON, or @file", metavar="JSON"
    )
    prefill_engine_args: str | None = option(
        None, "--prefill-engine-args", None, "Disaggregated: the engine of prefill workers", metavar="JSON"
    )
    decode_engine_args: str | None = option(
        None, "--decode-engine-args", None, "… and of decode workers", metavar="JSON"
    )
    conditional_disagg: bool = option(
        False,
        "--router-conditional-disagg",
        None,
        "Prompts of which little is new are computed where they are answered",
    )
    router_mode: str = option(
        "round_robin",
        "--router-mode",
        None,
        "Who chooses: round_robin, random, least_loaded, power_of_two, kv_router, balanced (ours), preble",
        metavar="MODE",
    )
    router_config: str | None = option(
        None, "--router-config", None, "Settings of kv_router and balanced: JSON, or @file", metavar="JSON"
    )
    kv_event_lag_ms: float = option(0.0, "--kv-event-lag-ms", None, "How late the router hears of cache changes")
    fail: list[str] = option(
        [],
        "--fail",
        None,
        "WORKER@SECONDS or WORKER@SECONDS+SECONDS: it fails then, and its successor starts so much later",
        metavar="W@T[+R]",
    )
    restart: list[str] = option(
        [], "--restart", None, "WORKER@SECONDS: it ends what it has, and a successor starts", metavar="W@T"
    )
    scale_at: list[str] = option(
        [], "--scale-at", None, "SECONDS=WORKERS or SECONDS=PREFILL/DECODE: from then on so many", metavar="T=N"
    )
    scale_load: str | None = option(
        None, "--scale-load", None, "More or fewer workers as the load is: `on`, or thresholds as JSON", metavar="JSON"
    )
    seed: int = option(42, "--arrival-seed", None, "Of all that is random", aliases=("--seed",))

    sla_ttft_ms: float | None = option(None, "--sla-ttft-ms", None, "Requests slower than this do not count as goodput")
    sla_itl_ms: float | None = option(None, "--sla-itl-ms", None, "… than this between tokens")
    sla_e2e_ms: float | None = option(None, "--sla-e2e-ms", None, "… than this in all")

    compare: list[str] = option(
        [],
        "--compare",
        None,
        "Another router mode, laid beside the first; its settings behind colons",
        metavar="MODE[:KEY=VALUE]",
    )
    report_json: str | None = option(None, "--report-json", None, "Where the report goes; - for the terminal")
    report_jsonl: str | None = option(None, "--report-jsonl", None, "Where a row for each request goes")
    report_trace: str | None = option(
        None, "--report-request-trace", None, "Where the requests go as a frontend would have written them down"
    )
    report_html: str | None = option(None, "--report-html", None, "Where a page with plots goes")
    capture_per_request: bool = option(False, "--capture-per-request", None, "Put the requests into the report, too")
    telemetry: bool = option(False, "--telemetry", None, "… and what each worker did over time")
    telemetry_interval_ms: float = option(1000.0, "--telemetry-interval-ms", None, "Over intervals of so many ms")
    progress: bool = option(True, "--progress", None, "Show a bar while it runs, on a terminal")

    def __post_init__(self) -> None:
        made_up = (self.input_tokens, self.output_tokens, self.request_count)
        if self.trace and any(value is not None for value in made_up):
            raise ConfigError("a trace, or --input-tokens, --output-tokens and --request-count, but not both")
        if not self.trace and None in made_up:
            raise ConfigError(
                "what should be replayed? A trace, or --input-tokens, --output-tokens and --request-count"
            )
        if not self.trace:
            ways = (self.arrival_interval_ms, self.request_rate, self.replay_concurrency)
            if sum(way is not None for way in ways) != 1:
                raise ConfigError("expected one of --arrival-interval-ms, --request-rate and --replay-concurrency")
        for flag, number in (
            ("--trace-block-size", self.trace_block_size),
            ("--request-limit", 1 if self.request_limit is None else self.request_limit),
        ):
            if number < 1:
                raise ConfigError(f"{flag} {number}: expected 1 or more")
        if self.telemetry_interval_ms <= 0:
            raise ConfigError(f"--telemetry-interval-ms {self.telemetry_interval_ms:g}: expected more than 0")
        if self.kv_event_lag_ms and canonical(self.router_mode) not in CACHE_AWARE:
            raise ConfigError("--kv-event-lag-ms: only a router mode that hears of caches can hear of them late")
        if self.scale_at and self.scale_load:
            raise ConfigError("--scale-at or --scale-load: a cluster has one planner")
        self._check_pools()
        if self.replay_mode == "online":
            self._check_online()

    def _check_pools(self) -> None:
        pools = (self.num_prefill_workers, self.num_decode_workers)
        if (pools[0] is None) != (pools[1] is None):
            raise ConfigError("--num-prefill-workers and --num-decode-workers come together")
        if self.is_disaggregated and self.num_workers is not None:
            raise ConfigError("--num-workers: only where workers are aggregated")
        args = (self.prefill_engine_args, self.decode_engine_args)
        if (args[0] is None) != (args[1] is None):
            raise ConfigError("--prefill-engine-args and --decode-engine-args come together")
        if args[0] is not None and self.extra_engine_args is not None:
            raise ConfigError("--extra-engine-args, or --prefill-engine-args and --decode-engine-args, but not both")
        if not self.is_disaggregated and (args[0] is not None or self.conditional_disagg):
            raise ConfigError(
                "workers are not disaggregated: --num-prefill-workers and --num-decode-workers are missing"
            )

    def _check_online(self) -> None:
        """The cluster is what it is: what would describe it is refused."""
        if self.trace is None and self.input_tokens is None:
            return
        for flag, is_given in (
            ("--num-workers", self.num_workers is not None),
            ("--num-prefill-workers", self.is_disaggregated),
            ("--extra-engine-args", self.extra_engine_args is not None),
            ("--router-mode", self.router_mode != "round_robin"),
            ("--router-config", self.router_config is not None),
            ("--kv-event-lag-ms", self.kv_event_lag_ms > 0),
            ("--fail", bool(self.fail)),
            ("--restart", bool(self.restart)),
            ("--scale-at", bool(self.scale_at)),
            ("--scale-load", self.scale_load is not None),
            ("--compare", bool(self.compare)),
        ):
            if is_given:
                raise ConfigError(f"{flag}: only offline; a frontend that runs has its workers and its router")
        if self.connections < 1:
            raise ConfigError(f"--connections {self.connections}: expected 1 or more")
        if not self.request_timeout_s > 0:
            raise ConfigError(f"--request-timeout-seconds {self.request_timeout_s:g}: expected more than 0")
        self.token_ids()

    @property
    def is_disaggregated(self) -> bool:
        """Whether some workers prefill and others decode."""
        return self.num_prefill_workers is not None

    def token_ids(self) -> range:
        """What online prompts are made of."""
        low, _, high = self.prompt_token_ids.partition("-")
        try:
            found = range(int(low), int(high) + 1)
        except ValueError:
            found = range(0)
        if len(found) < 2 or found.start < 0:
            raise ConfigError(f"--prompt-token-ids {self.prompt_token_ids}: expected LOW-HIGH")
        return found

    def objectives(self) -> Objectives:
        """What counts as goodput."""
        return Objectives(self.sla_ttft_ms, self.sla_itl_ms, self.sla_e2e_ms)

    def engine(self) -> EngineArgs:
        """The simulated engine that answers."""
        if self.decode_engine_args is not None:
            return engine_args(self.decode_engine_args, "--decode-engine-args")
        return engine_args(self.extra_engine_args)

    def planner(self) -> Planner | None:
        """Who decides how many workers there are, if anybody does; a new one each time."""
        if self.scale_load is not None:
            return load_thresholds(self.scale_load)
        return Timetable([entry(words) for words in self.scale_at]) if self.scale_at else None

    def source(self) -> Source:
        """What is asked, read or made up."""
        if self.trace is None:
            return Source(self._made_up(), self.trace_block_size)
        paths = self.trace.split(",")
        if self.trace_format in {"agentic-mooncake", "applied-compute-agentic"}:
            if self.trace_format == "agentic-mooncake":
                plays, block_tokens = plays_of(lines(paths))
            else:
                plays, block_tokens = trajectories_of(lines(paths), self.trace_block_size), self.trace_block_size
            plays = plays[: self.request_limit]
            return Source([session for play in plays for session in play.sessions], block_tokens, plays)
        if self.trace_format == "dynamo":
            found, block_tokens = sessions_of(lines(paths))
        else:
            found, block_tokens = read(paths, self.trace_format, self.trace_block_size), self.trace_block_size
        return Source(found[: self.request_limit], block_tokens)

    def _made_up(self) -> list[Session]:
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

    def scenarios(self, source: Source) -> dict[str, Scenario]:
        """What to run, by the name it has beside the others."""
        settings = given(self.router_config, "--router-config")
        found = {self.router_mode: self._scenario(source, self.router_mode, settings)}
        for words in self.compare:
            mode, *pairs = words.split(":")
            found[words] = self._scenario(source, mode, {**settings, **dict(map(_setting, pairs))})
        return found

    def _scenario(self, source: Source, mode: str, settings: dict[str, object]) -> Scenario:
        self.planner()  # What is wrong with it is said before anything runs.
        prefill = None
        if self.prefill_engine_args is not None:
            prefill = engine_args(self.prefill_engine_args, "--prefill-engine-args")
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
            event_lag_ms=self.kv_event_lag_ms,
            interval_ms=self.telemetry_interval_ms,
            max_sim_time_ms=self.max_sim_time_ms,
            seed=self.seed,
        )

    @property
    def workers(self) -> int:
        """How many answer."""
        return self.num_decode_workers or (1 if self.num_workers is None else self.num_workers)


def _setting(pair: str) -> tuple[str, object]:
    name, _, text = pair.partition("=")
    try:
        return name, msgspec.json.decode(text)
    except msgspec.DecodeError:
        return name, text


def failure(words: str) -> Failure:
    """`3@60+20`: worker 3 fails at 60 s, and its successor starts 20 s later."""
    worker, _, times = words.partition("@")
    at, plus, later = times.partition("+")
    try:
        return Failure(float(at) * 1000, int(worker), float(later) * 1000 if plus else None)
    except ValueError:
        raise ConfigError(f"--fail {words}: expected WORKER@SECONDS or WORKER@SECONDS+SECONDS") from None


def restart(words: str) -> Restart:
    """`3@60`: worker 3 is restarted at 60 s."""
    worker, _, at = words.partition("@")
    try:
        return Restart(float(at) * 1000, int(worker))
    except ValueError:
        raise ConfigError(f"--restart {words}: expected WORKER@SECONDS") from None
