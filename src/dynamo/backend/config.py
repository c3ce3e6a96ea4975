"""WorkerOptions: the flags that every worker has, whatever its engine (serving-plane.md §3.8)."""

import os
import socket
from dataclasses import dataclass

from dynamo.backend.disagg import DisaggregationMode, mode_of
from dynamo.core.config import option, setting
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.model_card.thinking import DISABLED, ENABLED
from dynamo.model_card.tool_call_tags import TagPolicy
from dynamo.parsers.registry import reasoning_family, tool_call_family
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.config import RuntimeOptions

ENDPOINT = "generate"
ENDPOINT_TYPES = {"chat": "Chat", "completions": "Completions"}
"""What a model may answer, and how its card says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(RuntimeOptions):
    """Options of every worker.

    A subclass with rules of its own begins its `__post_init__` with `WorkerOptions.__post_init__(self)`.
    """

    namespace: str = option("dynamo", "--namespace", "DYN_NAMESPACE", "Namespace to serve in")
    endpoint: str | None = option(
        None, "--endpoint", "DYN_ENDPOINT", "Endpoint to serve, dyn://namespace.component.endpoint, beating --namespace"
    )
    tool_call_parser: str | None = option(
        None, "--dyn-tool-call-parser", "DYN_TOOL_CALL_PARSER", "How this model writes tool calls; put on its card"
    )
    reasoning_parser: str | None = option(
        None, "--dyn-reasoning-parser", "DYN_REASONING_PARSER", "How this model writes reasoning; put on its card"
    )
    default_thinking_mode: str | None = option(
        None,
        "--dyn-default-thinking-mode",
        "DYN_DEFAULT_THINKING_MODE",
        "Whether the model thinks where a request does not say; put on its card",
        choices=(ENABLED, DISABLED),
    )
    exclude_tools_when_tool_choice_none: bool = option(
        True,
        "--exclude-tools-when-tool-choice-none",
        "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
        "Keep tools out of the prompt when tool_choice is none",
    )
    structural_tag: str | None = option(
        None,
        "--dyn-structural-tag",
        "DYN_STRUCTURAL_TAG",
        "Hold tool calls to this model's own format: true, false, or a JSON object with scope and schema",
    )
    custom_jinja_template: str | None = option(
        None, "--custom-jinja-template", "DYN_CUSTOM_JINJA_TEMPLATE", "File with a chat template to use instead"
    )
    endpoint_types: list[str] = option(
        ["chat", "completions"],
        "--endpoint-types",
        "DYN_ENDPOINT_TYPES",
        "What the model may be asked for: chat, completions",
        aliases=("--dyn-endpoint-types",),
    )
    dump_config_to: str | None = option(
        None, "--dump-config-to", "DYN_DUMP_CONFIG_TO", "File to write the configuration to, as JSON"
    )
    durable_kv_events: bool = option(
        False,
        "--durable-kv-events",
        "DYN_DURABLE_KV_EVENTS",
        "Tell what the KV cache holds through a JetStream stream of the NATS server (NATS_SERVER), as routers must be told too",
    )
    engine_request_limit: int | None = option(
        None, "--engine-request-limit", "DYN_ENGINE_REQUEST_LIMIT", "Requests the engine is given at once"
    )

    def __post_init__(self) -> None:
        self.endpoint_id()
        if self.engine_request_limit is not None and self.engine_request_limit < 1:
            raise ConfigError(f"--engine-request-limit {self.engine_request_limit}: expected 1 or more")
        if self.tool_call_parser is not None:
            tool_call_family(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_family(self.reasoning_parser)
        unknown = [kind for kind in self.endpoint_types if kind not in ENDPOINT_TYPES]
        if unknown or not self.endpoint_types:
            raise ConfigError(f"--endpoint-types {','.join(unknown)!r}: expected one or more of chat, completions")
        if self.custom_jinja_template is not None and not os.path.isfile(self.custom_jinja_template):
            raise ConfigError(f"--custom-jinja-template {self.custom_jinja_template}: no such file")
        self.tag_policy()

    @property
    def role(self) -> DisaggregationMode:
        """What it does of each request."""
        return DisaggregationMode.AGGREGATED

    def endpoint_id(self) -> EndpointId:
        """Where this worker serves. Raises `ConfigError` for a name that cannot be one."""
        suffix = setting("DYN_NAMESPACE_WORKER_SUFFIX", "", str)
        namespace = f"{self.namespace}-{suffix}" if suffix else self.namespace
        try:
            return EndpointId.parse(self.endpoint or f"{namespace}.{self.role.component}.{ENDPOINT}")
        except InvalidArgument as error:
            raise ConfigError(f"{'--endpoint' if self.endpoint else '--namespace'}: {error}") from None

    def tag_policy(self) -> TagPolicy | None:
        """What `--dyn-structural-tag` says. Raises `ConfigError` for what it cannot say."""
        if self.structural_tag is None:
            return None
        try:
            return TagPolicy.read(self.structural_tag)
        except InvalidArgument as error:
            raise ConfigError(f"--dyn-structural-tag {self.structural_tag}: {error}") from None

    def model_type(self) -> str:
        """The card's word for what the model may be asked for."""
        return " | ".join(word for kind, word in ENDPOINT_TYPES.items() if kind in self.endpoint_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregatedOptions(WorkerOptions):
    """Disaggregation role of a worker."""

    disaggregation_mode: str | None = option(
        None,
        "--disaggregation-mode",
        None,
        "What this worker does of each request; agg, all of it, unless told",
        choices=tuple(mode.value for mode in DisaggregationMode),
    )
    is_prefill_worker: bool = option(False, "--is-prefill-worker", None, "Older form of --disaggregation-mode prefill")
    is_decode_worker: bool = option(False, "--is-decode-worker", None, "Older form of --disaggregation-mode decode")

    @property
    def role(self) -> DisaggregationMode:
        """What it does of each request. Raises `ConfigError` for flags that contradict each other."""
        return mode_of(
            self.disaggregation_mode,
            is_prefill_worker=self.is_prefill_worker,
            is_decode_worker=self.is_decode_worker,
        )


def own_address() -> str:
    """Where others reach this machine."""
    told = setting("DYN_HTTP_RPC_HOST", "", str) or setting("DYN_TCP_RPC_HOST", "", str)
    return told or socket.gethostbyname(socket.gethostname())


def grace_period_s() -> float:
    """How long a stopping worker keeps answering those who have not heard of it yet (§6.5): invalid 5, negative 0."""
    try:
        return max(0.0, setting("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 5.0, float))
    except ConfigError:
        return 5.0


def request_queue_limit() -> int:
    """How many requests may wait for a slot of `--engine-request-limit`."""
    limit = setting("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", 16, int)
    if limit < 0:
        raise ConfigError(f"DYN_DYNAMO_REQUEST_QUEUE_LIMIT={limit}: expected zero or more")
    return limit
