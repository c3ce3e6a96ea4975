"""Commands of `dynamo`: where each is implemented, its lines of the help page, and the options that shells complete."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from dynamo.core.interpreter import paused_collections


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    word: str
    place: str
    """`module:function`; the function takes the arguments and returns the exit status."""
    lines: Sequence[tuple[str, str]]
    """Usages after `dynamo`, each with its description."""
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """`module:class` of the options of each subcommand; the empty word is the command itself."""

    def function(self) -> Any:
        """Return the function, whose module is imported now."""
        module, _, name = self.place.partition(":")
        with paused_collections():
            return getattr(import_module(module), name)


SERVE = (
    Command(
        "serve",
        "dynamo.cli.serve:serve",
        (
            ("serve", "the bundled demo model on this machine's CPU, http://localhost:8000"),
            ("serve DIR", "a Llama, Qwen2 or Qwen3 checkpoint in Hugging Face layout"),
            ("serve DIR --workers 4", "four engines behind one frontend"),
            ("serve --engine mocker", "a simulated engine: real API, real timing, random tokens"),
            ("serve MODEL --engine vllm -- ARGS", "vLLM with its own arguments; also sglang, trtllm, openai_proxy"),
            ("serve -f graph.yaml", "the components of a DynamoGraphDeployment as processes of this machine"),
        ),
        {
            "": (
                "dynamo.cli.options:ServeConfig",
                "dynamo.frontend.config:FrontendConfig",
                "dynamo.cpu.config:CpuConfig",
            )
        },
    ),
    Command(
        "status",
        "dynamo.cli.machine_graphs:status",
        (("status", "what runs on this machine: graphs, models, workers, ports, health"),),
        {"": ("dynamo.cli.machine_graphs:MachineStatusConfig",)},
    ),
    Command(
        "logs",
        "dynamo.cli.machine_graphs:logs",
        (("logs [NAME]", "the last lines of a graph's processes; -f continues"),),
        {"": ("dynamo.cli.machine_graphs:MachineLogsConfig",)},
    ),
    Command(
        "stop",
        "dynamo.cli.machine_graphs:stop",
        (("stop [NAME]", "stop a graph after its requests are completed"),),
        {"": ("dynamo.cli.machine_graphs:MachineStopConfig",)},
    ),
    Command(
        "chat",
        "dynamo.cli.chat:chat",
        (("chat", "talk to the running server in this terminal"),),
        {"": ("dynamo.cli.chat:ChatConfig",)},
    ),
    Command(
        "top",
        "dynamo.cli.top:top",
        (("top", "models and workers of the running server: rates, latencies, load, cache"),),
        {"": ("dynamo.cli.top:TopConfig",)},
    ),
    Command(
        "requests",
        "dynamo.cli.requests:requests",
        (("requests [ID]", "the last requests and why they were slow: --slow, --failed, --follow"),),
        {"": ("dynamo.cli.requests:RequestsConfig",)},
    ),
)
EXPLAIN = (
    Command(
        "route",
        "dynamo.cli.route:route",
        (("route explain", "show why the KV router chose the workers of the last requests"),),
        {"explain": ("dynamo.cli.route:ExplainConfig",), "state": ("dynamo.cli.route:StateConfig",)},
    ),
    Command(
        "plan",
        "dynamo.cli.plan:plan",
        (("plan explain FILE", "show why the planner changed the number of workers, or did not"),),
        {"explain": ("dynamo.cli.plan:PlanExplainConfig",), "replay": ("dynamo.cli.plan:PlanReplayConfig",)},
    ),
    Command(
        "replay",
        "dynamo.cli.replay:replay",
        (("replay TRACE.jsonl", "simulate a cluster under the load of a trace"),),
        {
            "": ("dynamo.replay.config:ReplayConfig",),
            "fit": ("dynamo.replay.fit:FitConfig",),
            "sweep": ("dynamo.replay.sweep:SweepConfig",),
            "datagen": (),
            "sin-synth": ("dynamo.replay.sin_synth:SinConfig",),
            "convert": ("dynamo.replay.convert:ConvertConfig",),
        },
    ),
    Command(
        "recommend",
        "dynamo.profiler.recommend.command:recommend",
        (("recommend MODEL --gpu GPU", "find the deployment that meets latency objectives with the fewest GPUs"),),
        {"": ("dynamo.profiler.recommend.config:RecommendConfig",)},
    ),
)
ROUTER = Command(
    "router",
    "dynamo.cli.router:router",
    (
        ("router start MODE", "dynamo serve with a router mode and two workers"),
        ("router check --mode MODE", "prove with small requests that a router mode is in force"),
    ),
    {
        "start": ("dynamo.cli.options:ServeConfig",),
        "patch": ("dynamo.cli.router:RouterPatchConfig",),
        "check": ("dynamo.ops.router_check:RouterCheckConfig",),
    },
)
INTERCONNECT = Command(
    "check",
    "dynamo.ops.interconnect.command:check",
    (("check interconnect", "RDMA, NVLink and NIXL of a node, a pod or a recipe, with a measured transfer"),),
    {"interconnect": ("dynamo.ops.interconnect.command:InterconnectConfig",)},
)
DIAGNOSE = (
    Command(
        "doctor",
        "dynamo.ops.doctor.command:doctor",
        (("doctor", "check this machine: packages, GPUs, ports, discovery, settings; what to do"),),
        {"": ("dynamo.ops.doctor.command:DoctorConfig",)},
    ),
    Command(
        "sanity-check",
        "dynamo.ops.doctor.command:doctor",
        (("sanity-check", "the same as doctor, by the name of upstream's script"),),
        {"": ("dynamo.ops.doctor.command:DoctorConfig",)},
    ),
    Command(
        "troubleshoot",
        "dynamo.ops.troubleshoot.command:troubleshoot",
        (("troubleshoot", "find known causes of failures in the local graph, a cluster or a bundle"),),
        {"": ("dynamo.ops.troubleshoot.command:TroubleshootConfig",)},
    ),
)
KUBERNETES = (
    Command(
        "deploy",
        "dynamo.cli.deploy:deploy",
        (("deploy validate FILE...", "check Kubernetes manifests; other verbs apply them and show their state"),),
        {
            "validate": ("dynamo.cli.deploy:ValidateConfig",),
            "render": ("dynamo.cli.deploy:RenderConfig",),
            "diff": ("dynamo.cli.deploy:ClusterConfig",),
            "apply": ("dynamo.cli.deploy:ApplyConfig",),
            "status": ("dynamo.cli.deploy:StatusConfig",),
            "logs": ("dynamo.cli.deploy:LogsConfig",),
            "delete": ("dynamo.cli.deploy:ClusterConfig",),
        },
    ),
)
RECIPES = (
    Command(
        "recipe",
        "dynamo.cli.recipe:recipe",
        (
            ("recipe list", "deployments of known models; show, validate and patch one of them"),
            ("recipe run NAME", "deploy one in order, wait, send a request, run its benchmark"),
        ),
        {
            "list": ("dynamo.cli.recipe:RecipeListConfig",),
            "show": ("dynamo.cli.recipe:RecipeTargetConfig",),
            "validate": ("dynamo.cli.recipe:RecipeTargetConfig",),
            "patch": ("dynamo.cli.recipe:RecipePatchConfig",),
            "run": ("dynamo.cli.recipe:RecipeRunConfig",),
        },
    ),
)
CONTRIBUTE = (
    Command(
        "perf-review",
        "dynamo.ops.reviews.perf_review:perf_review",
        (("perf-review [DIFF]", "costs that a diff adds to hot paths, and their impact"),),
        {"": ("dynamo.ops.reviews.perf_review:PerfReviewConfig",)},
    ),
    Command(
        "pr-review",
        "dynamo.ops.reviews.pr_review:pr_review",
        (("pr-review PR", "the steps of a review on one GPU; --run does them and drafts the review"),),
        {"": ("dynamo.ops.reviews.pr_review:PrReviewConfig",)},
    ),
    Command(
        "worklog",
        "dynamo.ops.reviews.records:worklog",
        (("worklog new SUBJECT", "the record of a debugging session"),),
        dict.fromkeys(("new", "log", "status"), ("dynamo.ops.reviews.records:WorklogConfig",)),
    ),
    Command(
        "proposal",
        "dynamo.ops.reviews.records:proposal",
        (("proposal new TITLE", "an enhancement proposal and its labels"),),
        dict.fromkeys(("new", "update"), ("dynamo.ops.reviews.records:ProposalConfig",)),
    ),
)
SHELL = (
    Command(
        "completion",
        "dynamo.cli.completion:completion",
        (("completion bash|zsh|fish", "print the completion of commands and flags for a shell"),),
        {"bash": (), "zsh": (), "fish": ()},
    ),
)
GROUPS: Mapping[str, Sequence[Command]] = {
    "Serve": SERVE,
    "Explain and simulate": EXPLAIN,
    "Diagnose": (*DIAGNOSE, INTERCONNECT, ROUTER),
    "Kubernetes": (*KUBERNETES, *RECIPES),
    "Contribute": CONTRIBUTE,
    "Shell": SHELL,
}
"""The commands in the order of the help page."""
COMMANDS: Mapping[str, Command] = {one.word: one for group in GROUPS.values() for one in group}
USAGE_WIDTH = 34


def help_lines() -> list[str]:
    """Return the lines of the help page: one for each usage, by group."""
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  dynamo {usage.ljust(USAGE_WIDTH)} {text}" for one in group for usage, text in one.lines]
        lines.append("")
    return lines
