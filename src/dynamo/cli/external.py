"""External engines: the workers of `dynamo serve --engine vllm`, `sglang`, `trtllm` and `openai_proxy`. Pure.

Their arguments follow `--` on the command line and are the engine's own; this module adds the model, the GPUs that a
worker needs, and the ports that must differ between the workers of one machine.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.cli.graph import PREFILL
from dynamo.core.errors import ConfigError
from dynamo.protocols.discovery import EndpointId

PORT_BASE = 20080
"""First of the ports for workers, below the range from which the kernel gives ports to outgoing connections."""
RANKS = 8
"""Ports of a worker for each purpose: one for each data-parallel rank."""
EVENTS, REPLAY, SIDE_CHANNEL, BOOTSTRAP, FORWARD_PASS = range(5)
"""Purposes of ports: KV events, their repetition, NIXL's side channel, SGLang's bootstrap server, forward-pass metrics."""
WORKERS = 128
"""Workers of one graph at most, prefill included."""
HASH_SEED = {"PYTHONHASHSEED": "0"}
"""Equal blocks have equal hashes in all workers."""
CHAT, COMPLETIONS = "chat", "completions"


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The flags of an engine that `dynamo serve` sets or reads."""

    model: tuple[str, ...]
    """Flag of the model, and its aliases."""
    sizes: tuple[tuple[str, ...], ...] = ()
    """Flags whose values multiply to the GPUs of one worker, with their aliases."""
    events: str = ""
    """Flag of the KV events."""
    name: str = "--served-model-name"


KINDS: Mapping[str, EngineKind] = {
    "vllm": EngineKind(
        ("--model",),
        (
            ("--tensor-parallel-size", "-tp"),
            ("--pipeline-parallel-size", "-pp"),
            ("--data-parallel-size", "-dp"),
        ),
        "--kv-events-config",
    ),
    "sglang": EngineKind(
        ("--model-path", "--model"),
        (
            ("--tensor-parallel-size", "--tp-size", "--tp"),
            ("--pipeline-parallel-size", "--pp-size", "--pp"),
            ("--data-parallel-size", "--dp-size", "--dp"),
        ),
        "--kv-events-config",
    ),
    "trtllm": EngineKind(
        ("--model", "--model-path"), (("--tensor-parallel-size",), ("--pipeline-parallel-size",)), "--publish-kv-events"
    ),
    "openai_proxy": EngineKind(("--model-path",)),
}
"""The engines, by the name of their package below `dynamo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngine:
    """Settings of an external engine's workers."""

    engine: str
    directory: str | None = None
    """Directory of MODEL; None without MODEL."""
    model_name: str | None = None
    """Name under which MODEL is served, unless the arguments set another; None: the engine's choice."""
    arguments: tuple[str, ...] = ()
    """The engine's own arguments."""
    namespace: str = "dynamo"
    custom_jinja_template: str | None = None
    endpoint_types: tuple[str, ...] = (CHAT, COMPLETIONS)

    def __post_init__(self) -> None:
        flag = self.kind.model[0]
        given = value_of(self.arguments, self.kind.model)
        if self.directory is not None and given is not None:
            raise ConfigError(f"MODEL {self.directory!r} and {flag} are mutually exclusive")
        if self.engine == "openai_proxy":
            if value_of(self.arguments, ("--url",)) is None:
                raise ConfigError("--engine openai_proxy: expected the server's URL after the options: -- --url URL")
        elif self.directory is None and given is None:
            raise ConfigError(f"MODEL is missing: --engine {self.engine} has no bundled model")

    @property
    def kind(self) -> EngineKind:
        """Return the flags of the engine."""
        return KINDS[self.engine]

    @property
    def model_path(self) -> str | None:
        """Return the model's directory or id."""
        return self.directory or value_of(self.arguments, self.kind.model)

    @property
    def embedding_worker(self) -> bool:
        """Return whether the workers serve embeddings."""
        return "--embedding-worker" in self.arguments

    @property
    def has_roles(self) -> bool:
        """Return whether there are prefill and decode workers of this engine."""
        return self.engine != "openai_proxy"

    @property
    def names_role(self) -> bool:
        """Return whether the arguments set the role of the workers themselves."""
        flags = ("--disaggregation-mode", "--is-prefill-worker", "--is-decode-worker")
        return any(word.partition("=")[0] in flags for word in self.arguments)

    @property
    def gpus(self) -> int:
        """Return the GPUs of one worker: the product of the engine's parallel sizes. Raise `ConfigError`."""
        if self.engine == "openai_proxy":
            return 0
        sizes = list(self.kind.sizes)
        if (
            "--enable-dp-attention" in self.arguments
        ):  # SGLang's ranks then share the GPUs of the tensor-parallel group.
            sizes = sizes[:2]
        return math.prod(_size(self.arguments, flags) for flags in sizes)

    def endpoint_id(self) -> EndpointId:
        """Return the endpoint of the workers, whose namespace the planner observes."""
        return EndpointId.parse(f"{value_of(self.arguments, ('--namespace',)) or self.namespace}.backend.generate")

    def flags(self) -> list[str]:
        """Return the arguments of every worker; the user's are last and override the others."""
        flag = self.kind.model[0]
        words = [] if self.directory is None else [f"{flag}={self.directory}"]
        is_named = value_of(self.arguments, (self.kind.name, "--model-name")) is not None
        if self.model_name is not None and not is_named:
            words.append(f"{self.kind.name}={self.model_name}")
        return [*words, *self.arguments]

    def per_worker(
        self, *, has_events: bool, has_roles: bool, has_gpus: bool, has_planner: bool, port_base: int
    ) -> "WorkerPorts":
        """Return what differs between the workers."""
        is_given = bool(self.kind.events) and any(word.partition("=")[0] == self.kind.events for word in self.arguments)
        return WorkerPorts(
            engine=self.engine,
            has_events=has_events and bool(self.kind.events) and not is_given,
            has_roles=has_roles,
            has_gpus=has_gpus,
            has_planner=has_planner,
            transfer=value_of(self.arguments, ("--kv-transfer-config", "--disaggregation-transfer-backend")) or "",
            base=port_base,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """Flags and variables of one worker of several: ports of its KV events and of its KV transfers."""

    engine: str
    has_events: bool
    has_roles: bool
    has_gpus: bool
    has_planner: bool
    transfer: str
    """The user's own choice of the transfer; empty for the default."""
    base: int = PORT_BASE

    def flags(self, role: str, index: int) -> tuple[str, ...]:
        """Return the flags of worker `index`, from 0, that its role and its number require."""
        words: list[str] = []
        if self.has_roles and not self.transfer:
            words += self._transfer_flags()
        if self.has_roles and self.engine == "sglang":
            words.append(f"--disaggregation-bootstrap-port={self.port(BOOTSTRAP, index)}")
        # A decode worker's blocks are not used for routing.
        if self.has_events and (not self.has_roles or role == PREFILL):
            words += self._event_flags(index)
        return tuple(words)

    def variables(self, index: int) -> dict[str, str]:
        """Return the environment of worker `index`, from 0."""
        found = dict(HASH_SEED)
        if self.has_planner:
            found["DYN_FORWARDPASS_METRIC_PORT"] = str(self.port(FORWARD_PASS, index))
        if self.engine == "vllm":
            found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port(SIDE_CHANNEL, index))
        return found

    def port(self, purpose: int, index: int) -> int:
        """Return the first port of worker `index` for a purpose."""
        return self.base + (purpose * WORKERS + index) * RANKS

    def _transfer_flags(self) -> list[str]:
        if self.engine == "vllm":
            connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
            if not self.has_gpus:
                connector["kv_buffer_device"] = "cpu"
            return [f"--kv-transfer-config={json.dumps(connector)}"]
        return ["--disaggregation-transfer-backend=nixl"] if self.engine == "sglang" else []

    def _event_flags(self, index: int) -> list[str]:
        if self.engine == "trtllm":
            return ["--publish-kv-events"]
        ports = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port(EVENTS, index)}",
            "replay_endpoint": f"tcp://*:{self.port(REPLAY, index)}",
        }
        settings = {"enable_kv_cache_events": True, **ports} if self.engine == "vllm" else ports
        return [f"--kv-events-config={json.dumps(settings)}"]


def value_of(arguments: Sequence[str], flags: Sequence[str]) -> str | None:
    """Return the last value of a flag with these names; None if it is not given."""
    found = None
    for at, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in flags:
            found = value if equals else arguments[at + 1] if at + 1 < len(arguments) else found
    return found


def _size(arguments: Sequence[str], flags: Sequence[str]) -> int:
    text = value_of(arguments, flags)
    if text is None:
        return 1
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{flags[0]} {text}: must be a whole number of at least 1")
    return int(text)
