"""Aims: the main figures of each result file, and the limits that they should keep.

    figures_of("frontend_memory", result) ─▶ [Figure("memory at the start, over the released", 0.78, "≤ 0.5", False), …]

A figure that a result lacks, as a run without the released system does, is left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]
MOST, LEAST = "≤", "≥"


@dataclass(frozen=True, slots=True)
class Aim:
    """One figure of a result, and its limit."""

    name: str
    read: Callable[[Result], float]
    """Raise `LookupError`, `TypeError` or `ZeroDivisionError` for a result without the figure."""
    limit: float | None = None
    """None: reported without an aim."""
    sign: str = MOST
    why: str = ""
    """Reason for which it is missed, as far as known."""

    @property
    def limit_text(self) -> str:
        """Return the aim in words; empty without one."""
        return "" if self.limit is None else f"{self.sign} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, its aim, and whether it is met (None without an aim)."""

    name: str
    value: float
    aim: str
    is_met: bool | None
    why: str

    @property
    def verdict(self) -> str:
        """Return `met` or `missed`; empty without an aim."""
        return "" if self.is_met is None else "met" if self.is_met else "missed"


def cpu(load: str, system: str = "ours", other: str = "theirs") -> Callable[[Result], float]:
    """Return the reader of a system's processor time per token over another's, under a load of `frontend_cpu`."""

    def read(result: Result) -> float:
        systems = result["medians"][load]
        return float(systems[system]["frontend_us_per_token"]["median"]) / float(
            systems[other]["frontend_us_per_token"]["median"]
        )

    return read


def at(*path: str | int) -> Callable[[Result], float]:
    """Return the reader of a number at a path of keys."""

    def read(result: Result) -> float:
        found: Any = result
        for key in path:
            found = found[key]
        return float(found)

    return read


def over(mine: Callable[[Result], float], other: Callable[[Result], float]) -> Callable[[Result], float]:
    """Return the reader of a quotient."""
    return lambda result: mine(result) / other(result)


def ours_over_theirs(*path: str) -> Callable[[Result], float]:
    """Return the reader of the quotient of the same number below `ours` and `theirs`."""
    return over(at("ours", *path), at("theirs", *path))


def _hashing(result: Result) -> float:
    """Return the largest ratio of our hashing to the released bindings'."""
    mine, other = result["medians"]["ours, C"], result["medians"]["released"]
    return max(float(mine[case]) / float(other[case]) for case in mine if case in other)


def _decision(result: Result) -> float:
    """Return the cost of a decision over 1,024 workers against 64."""
    cases = result["medians"]["ours"]
    one, other = (float(cases[f"a whole decision, 512 blocks, {workers} workers (µs)"]) for workers in (1024, 64))
    return one / other


def _index_pause(result: Result) -> float:
    """Return the longest pause of an event on the largest index of `scale`, in milliseconds."""
    largest = result["index"][max(result["index"], key=int)]
    return max(float(value) for name, value in largest.items() if name.endswith("pause_ms"))


def _searches(result: Result) -> float:
    """Return the largest loss of a search for a deployment."""
    return max(float(load["loss"]) for load in result["loads"].values())


def _deviation(result: Result) -> float:
    """Return the largest relative deviation of a median time to first token from the released replay's."""
    cells = [case["median_ttft_ms"] for case in result["cases"].values()]
    return max(abs(float(cell["ours"]) / float(cell["theirs"]) - 1) for cell in cells)


def _fidelity(result: Result) -> float:
    """Return the largest relative deviation of a percentile of our mocker from the released one's."""
    return max(abs(float(ratio) - 1) for ratio in result["ratios"].values())


def _pace(result: Result) -> float:
    """Return the largest relative deviation of a load's total time with our mocker from the released one's, above one stream.

    A single stream of the released mocker waits for its first token up to 0.2 s longer, at random.
    """
    totals = {(run["streams"], run["mocker"]): float(run["all_s"]) for run in result["runs"]}
    several = {streams for streams, _ in totals if streams > 1}
    return max(abs(totals[streams, "ours"] / totals[streams, "theirs"] - 1) for streams in several)


def _regret(policy: str) -> Callable[[Result], float]:
    """Return the reader of a policy's latency over the lowest of all policies, mean of all random shapes at light load."""

    def read(result: Result) -> float:
        found = []
        for shape in result["shapes"].values():
            point = shape["strengths"]["light"]
            found.append(float(point[policy]["e2e"]) / min(float(one["e2e"]) for one in point.values()))
        return sum(found) / len(found)

    return read


def _live(result: Result) -> float:
    """Return the largest relative error of the simulation, with the measured overhead, of a figure of our live stack."""
    checks = [engine["ours"]["check"] for engine in result["engines"].values()]
    return max(
        abs(float(one["with_overhead"][name]) / float(live) - 1) for one in checks for name, live in one["live"].items()
    )


def _plane(medians: Mapping[str, Mapping[str, float]], way: str) -> float:
    return medians[way]["caller_us_per_token"] + medians[way]["worker_us_per_token"]


PACED_WHY = "most of it is one write per token in the kernel (the bare writer's column), and more than half of the rest is work per request"
KERNEL_WHY = "the rest is parsing, templating and tokenizing of each request"
SAME_WHY = "the released mocker sends a frame per token, which Python reads one by one"
KV_WHY = (
    "hashing, the decision and the workers' events are paid per request, and a token of round robin costs 3 to 4 µs"
)
IMPORTS_WHY = "Python's interpreter and the modules of the request path"
FLOODS_WHY = "thousands of connections made at once are all accepted in one iteration of the loop, for 45 to 52 ms on a slow core"
REPLAY_WHY = "each step of a worker that ends a sequence or computes a prompt, and each allocated block, is an event of its own, in Python"

AIMS: Mapping[str, tuple[Aim, ...]] = {
    "frontend_cpu": (
        Aim("processor time per token, saturated, 64 streams, over the released", cpu("saturated c=64"), 0.15, why=KERNEL_WHY),
        Aim("the same, 256 streams", cpu("saturated c=256"), 0.15, why=KERNEL_WHY),
        Aim("the same, paced, 64 streams", cpu("paced c=64"), 0.22, why=PACED_WHY),
        Aim("the same, paced, 256 streams", cpu("paced c=256"), 0.22, why=PACED_WHY),
        Aim("with the released mockers behind both, saturated, 64 streams", cpu("saturated c=64", "ours+peer-mocker"), 0.45, why=SAME_WHY),
        Aim("the same, paced, 64 streams", cpu("paced c=64", "ours+peer-mocker"), 0.5, why=SAME_WHY),
        Aim("KV router over round robin, saturated", at("kv_over_round_robin", "saturated c=64 kv", "ours"), 1.1, why=KV_WHY),
    ),
    "frontend_latency": (
        Aim("first token of a single request, over the released", over(at("first_token_ms", "ours", "p50"), at("first_token_ms", "theirs", "p50")), 1.0),
        Aim("tokens per second on a core half busy, over the released", over(at("paces", "ours", -1, "tokens_per_s"), at("paces", "theirs", -1, "tokens_per_s")), 1.0, LEAST),
    ),
    "frontend_memory": (
        Aim("memory at the start, over the released", ours_over_theirs("start"), 0.5, why=IMPORTS_WHY),
        Aim("memory with 256 streams, over the released", ours_over_theirs("busy"), 0.5),
    ),
    "start": (
        Aim("time until the frontend is ready, over the released", at("ratios", "ready_s"), 1.0, why=IMPORTS_WHY),
        Aim("memory of a frontend without a model, over the released", at("ratios", "rss_mib"), 0.5, why=IMPORTS_WHY),
        Aim("start of `dynamo serve` to the first chat, s", at("serve_demo_s"), 1.5),
    ),
    "http_workers": (
        Aim("requests per second of two processes, over the released on all cores", over(at("requests_per_s", "ours, 2 processes"), at("requests_per_s", "theirs")), 1.0, LEAST),
        Aim("cached share of two processes, over that of one", over(at("cached_share", "2 processes"), at("cached_share", "1 process")), 0.99, LEAST),
    ),
    "long_context": (Aim("other streams' tokens at p99 during long prompts, ms", at("ours", "loaded", "p99"), 50.0),),
    "floods": (Aim("attacks that delay tokens by more than 50 ms at p99", at("summary", "above"), 0.0, why=FLOODS_WHY),),
    "gateway_overhead": (
        Aim("processor time per request, 64 streams, over LiteLLM's", over(at("ours", "64", "us_per_request"), at("litellm", "64", "us_per_request"))),
    ),
    "router": (
        Aim("decision over 1,024 workers, over one over 64", _decision, 2.0),
    ),
    "scale": (
        Aim("decision over 4,096 workers, ms", lambda found: at("workers", "4096", "dynamo_decision_us")(found) / 1e3, 1.5),
        Aim("longest pause of an event on the largest index, ms", _index_pause, 10.0),
        Aim("workers that join, noticed by every frontend after s", at("joins", "noticed_s"), 3.0),
    ),
    "block_hashing": (Aim("hashing a block, over the released bindings", _hashing, 1.0),),
    "router_churn": (Aim("growth of memory over a million requests", at("growth"), 0.05),),
    "cpu_engine": (
        Aim("decode of one sequence, over transformers", at("ratios", "decode 1"), 1.0, LEAST),
        Aim("decode of 8 sequences, over transformers", at("ratios", "decode 8"), 1.0, LEAST),
        Aim("prefill of 512 tokens, over transformers", at("ratios", "prefill 512"), 1.0, LEAST),
        Aim("prefill of 1,536 tokens, over transformers", at("ratios", "prefill 1536"), 1.0, LEAST),
        Aim("chunked prefill, over one shot", at("chunked_over_one_shot"), 1.1),
    ),
    "lora_step": (
        Aim("step of 8 rows with one adapter, over none", over(at("steps_ms", "8 rows", "one for all", "median_ms"), at("steps_ms", "8 rows", "none", "median_ms"))),
    ),
    "response_frames": (Aim("caller's processor time per token, upstream's framing over ours", at("ratio", "caller")),),
    "request_plane": (
        Aim("processor time per token of both ends, over the released", lambda found: _plane(found["figures"]["medians"], "ours → ours") / _plane(found["figures"]["medians"], "theirs → theirs")),
    ),
    "idle_streams": (Aim("memory of an idle stream, over the released", at("figures", "ratio")),),
    "kv_transfer": (
        Aim("shared memory, over memcpy", over(at("ways", "shm", "gb_s"), at("ways", "memcpy, block by block", "gb_s"))),
        Aim("TCP, over memcpy", over(at("ways", "tcp", "gb_s"), at("ways", "memcpy, block by block", "gb_s"))),
    ),
    "discovery": (
        Aim("complete view of the workers from files, ms", at("backends", "file", "view_ms")),
        Aim("complete view of the workers from etcd, ms", at("backends", "etcd", "view_ms")),
    ),
    "replay_scale_8x1": (Aim("processor time of the trace on 8 workers, s", at("cpu_s"), 15.0),),
    "replay_scale_64x10": (Aim("processor time of ten copies on 64 workers, s", at("cpu_s"), 90.0, why=REPLAY_WHY),),
    "recommend_search": (Aim("largest loss of the search", _searches),),
    "tokenizer": (Aim("first tokenization of a prompt, over tokenizers", over(at("us", "ours, words", 0), at("us", "tokenizers", 0))),),
    "guided": (Aim("token mask of a JSON schema, 16,384 tokens, µs", at("medians", "16384 tokens", "JSON schema", 1)),),
    "replay_peer": (Aim("largest deviation of a median time to first token from the released replay", _deviation),),
    "routing_regret": (
        Aim("latency of `balanced` over the lowest of all policies, mean of random shapes, light load", _regret("balanced"), 1.02),
        Aim("the same of upstream's cost", _regret("kv default")),
    ),
    "replay_live": (Aim("largest error of the simulation of our live stack", _live, 0.03),),
    "mocker_fidelity": (Aim("largest deviation of a percentile of the mocker's times from the released mocker's", _fidelity, 0.05),),
    "mocker_pace": (Aim("largest deviation of the total time of a load from the released mocker's", _pace, 0.05),),
    "replay_fidelity": (Aim("time to first token, simulated over real", over(at("virtual", "TTFT ms"), at("real", "TTFT ms"))),),
    "operator_scale": (Aim("processor time until all graphs are ready, over kopf's", over(at("figures", "ours", "cpu_s"), at("figures", "kopf", "cpu_s"))),),
    "epp_picks": (Aim("processor time of a pick, over a bare gRPC server", over(at("picker", 0, "cpu_us"), at("bare gRPC server", 0, "cpu_us"))),),
    "kv_tiers": (Aim("first token with blocks in host memory, over computing it", over(at("first_token_s", "G2, host"), at("first_token_s", "computed"))),),
    "kubernetes_discovery": (Aim("complete view of the worker pods, s", at("view_s")),),
    "console_cost": (Aim("idle frontend with 16 viewers, share of a core", at("figures", "core_share", "16 viewers")),),
    "disagg_ttft": (Aim("first token by a prefill worker, over one worker alone", at("prefill, then decode", "of_alone")),),
    "planner_tick": (Aim("processor time of a tick at p99, ms", at("tick_cpu_ms", "p99")),),
    "engine_accuracy": (Aim("error of the time to first token on engines that were left out, %", at("b200", "left out", "mean absolute error %", "ttft_ms")),),
    "tracing": (Aim("log fields and tracing while off, µs per request", at("off_us")),),
}  # fmt: skip
"""The figures of each result file."""


def figures_of(name: str, result: Result) -> list[Figure]:
    """Return the main figures of a result file without `.json`; those that it lacks are left out."""
    found = []
    for aim in AIMS.get(name, ()):
        try:
            value = aim.read(result)
        except (LookupError, TypeError, ZeroDivisionError):
            continue
        is_met = None if aim.limit is None else value <= aim.limit if aim.sign == MOST else value >= aim.limit
        found.append(Figure(aim.name, value, aim.limit_text, is_met, aim.why))
    return found
