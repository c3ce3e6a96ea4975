"""WorkerOptions: the flags that workers of all engines share."""

import os
import socket
from dataclasses import dataclass

from dynamo.backend.disagg import DisaggregationMode, mode_of
from dynamo.core.config import option, setting
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.unsupported_flags import UnsupportedFlag
from dynamo.model_card.card import DISABLED, ENABLED
from dynamo.model_card.tool_call_tags import TagPolicy
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.config import RuntimeOptions

ENDPOINT = "generate"
ENDPOINT_TYPES = {"chat": "Chat", "completions": "Completions"}
"""Values of `--endpoint-types` and their names on the card."""
NO_ENDPOINT_TYPES = "none"
"""Value for a worker that serves no clients itself: another process in front of it does."""
UNSUPPORTED_WORKER_FLAGS = (
    UnsupportedFlag("--kv-state-endpoint", "DYN_KV_STATE_ENDPOINT", ""),
    UnsupportedFlag("--fpm-trace", "DYN_FPM_TRACE", False),
    UnsupportedFlag("--connector", "DYN_CONNECTOR", ""),
    UnsupportedFlag("--multimodal-embedding-cache-capacity-gb", "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB", "0"),
    UnsupportedFlag("--multimodal-embedding-cache-publisher", "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER", False),
    UnsupportedFlag("--output-modalities", "DYN_OUTPUT_MODALITIES", "text"),
    UnsupportedFlag("--media-output-fs-url", "DYN_MEDIA_OUTPUT_FS_URL", "file:///tmp/dynamo_media"),
    UnsupportedFlag("--media-output-http-url", "DYN_MEDIA_OUTPUT_HTTP_URL", ""),
    UnsupportedFlag("--health-check-payload", None, "", hint="set DYN_HEALTH_CHECK_PAYLOAD instead"),
    UnsupportedFlag("--migration-limit", None, "0", hint="set --migration-limit of the frontend instead"),
)
"""Flags of upstream's workers that are refused unless they have their default value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(RuntimeOptions):
    """Options of every worker.

    A subclass with rules of its own starts its `__post_init__` with `WorkerOptions.__post_init__(self)`.
    """

    namespace: str = option("dynamo", "--namespace", "DYN_NAMESPACE", "Namespace to serve in")
    endpoint: str | None = option(
        None,
        "--endpoint",
        "DYN_ENDPOINT",
        "Endpoint to serve, dyn://namespace.component.endpoint; overrides --namespace",
    )
    tool_call_parser: str | None = option(
        None, "--dyn-tool-call-parser", "DYN_TOOL_CALL_PARSER", "Tool call format of the model; published on its card"
    )
    reasoning_parser: str | None = option(
        None, "--dyn-reasoning-parser", "DYN_REASONING_PARSER", "Reasoning format of the model; published on its card"
    )
    default_thinking_mode: str | None = option(
        None,
        "--dyn-default-thinking-mode",
        "DYN_DEFAULT_THINKING_MODE",
        "Thinking mode of requests that do not set one: enabled or disabled; published on the card",
        choices=(ENABLED, DISABLED),
    )
    exclude_tools_when_tool_choice_none: bool = option(
        True,
        "--exclude-tools-when-tool-choice-none",
        "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
        "Omit tools from the prompt if tool_choice is none",
    )
    structural_tag: str | None = option(
        None,
        "--dyn-structural-tag",
        "DYN_STRUCTURAL_TAG",
        "Constrain tool calls to the model's format: true, false, or a JSON object with scope and schema",
        extra={"const": "true"},
    )
    enable_structural_tag: bool | None = option(
        None, "--dyn-enable-structural-tag", "DYN_ENABLE_STRUCTURAL_TAG", "Deprecated: set --dyn-structural-tag"
    )
    structural_tag_scope: str | None = option(
        None,
        "--dyn-structural-tag-scope",
        "DYN_STRUCTURAL_TAG_SCOPE",
        "Deprecated: set the scope in --dyn-structural-tag",
        choices=("auto", "always"),
    )
    structural_tag_schema: str | None = option(
        None,
        "--dyn-structural-tag-schema",
        "DYN_STRUCTURAL_TAG_SCHEMA",
        "Deprecated: set the schema in --dyn-structural-tag",
        choices=("auto", "strict"),
    )
    custom_jinja_template: str | None = option(
        None,
        "--custom-jinja-template",
        "DYN_CUSTOM_JINJA_TEMPLATE",
        "File with a chat template that replaces the model's",
    )
    endpoint_types: list[str] = option(
        ["chat", "completions"],
        "--endpoint-types",
        "DYN_ENDPOINT_TYPES",
        "Request types of the model: chat, completions; none for a worker behind another router",
        aliases=("--dyn-endpoint-types",),
    )
    dump_config_to: str | None = option(
        None, "--dump-config-to", "DYN_DUMP_CONFIG_TO", "File to which the configuration is written as JSON"
    )
    durable_kv_events: bool = option(
        False,
        "--durable-kv-events",
        "DYN_DURABLE_KV_EVENTS",
        "Publish KV cache events on a JetStream stream of the NATS server (NATS_SERVER); set it for routers too",
    )
    engine_request_limit: int | None = option(
        None,
        "--engine-request-limit",
        "DYN_ENGINE_REQUEST_LIMIT",
        "Maximum number of concurrent requests in the engine",
    )

    def __post_init__(self) -> None:
        self.endpoint_id()
        if self.engine_request_limit is not None and self.engine_request_limit < 1:
            raise ConfigError(f"--engine-request-limit {self.engine_request_limit}: must be 1 or more")
        if self.tool_call_parser is not None or self.reasoning_parser is not None:
            self._check_parsers()
        unknown = [kind for kind in self.endpoint_types if kind not in ENDPOINT_TYPES]
        if self.endpoint_types != [NO_ENDPOINT_TYPES] and (unknown or not self.endpoint_types):
            raise ConfigError(
                f"--endpoint-types {','.join(unknown)!r}: must be {NO_ENDPOINT_TYPES}, or one or more of chat, completions"
            )
        if self.custom_jinja_template is not None and not os.path.isfile(self.custom_jinja_template):
            raise ConfigError(f"--custom-jinja-template {self.custom_jinja_template}: no such file")
        self.tag_policy()

    def _check_parsers(self) -> None:
        from dynamo.parsers.registry import reasoning_family, tool_call_family  # Loads every parser.

        if self.tool_call_parser is not None:
            tool_call_family(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_family(self.reasoning_parser)

    @property
    def role(self) -> DisaggregationMode:
        """The disaggregation role of the worker."""
        return DisaggregationMode.AGGREGATED

    def endpoint_id(self) -> EndpointId:
        """Return the endpoint of this worker. Raise `ConfigError` for an invalid name."""
        suffix = setting("DYN_NAMESPACE_WORKER_SUFFIX", "", str)
        namespace = f"{self.namespace}-{suffix}" if suffix else self.namespace
        try:
            return EndpointId.parse(self.endpoint or f"{namespace}.{self.role.component}.{ENDPOINT}")
        except InvalidArgument as error:
            raise ConfigError(f"{'--endpoint' if self.endpoint else '--namespace'}: {error}") from None

    def tag_policy(self) -> TagPolicy | None:
        """Return the parsed value of `--dyn-structural-tag`, or of its former parts. Raise `ConfigError`."""
        parts = {"scope": self.structural_tag_scope, "schema": self.structural_tag_schema}
        parts = {name: value for name, value in parts.items() if value is not None}
        enabled = self.enable_structural_tag
        if self.structural_tag is None:
            is_wanted = bool(parts) if enabled is None else enabled
            return TagPolicy.of({"scope": "always", **parts}) if is_wanted else None
        try:
            policy = TagPolicy.read(self.structural_tag)
        except InvalidArgument as error:
            raise ConfigError(f"--dyn-structural-tag {self.structural_tag}: {error}") from None
        former = [f"--dyn-structural-tag-{name}" for name in parts]
        if enabled is not None and enabled is (policy is None):
            former.append(f"--{'' if enabled else 'no-'}dyn-enable-structural-tag")
        if former:
            raise ConfigError(
                f"--dyn-structural-tag {self.structural_tag}: cannot be combined with {', '.join(former)}"
            )
        return policy

    def model_type(self) -> str:
        """Return the card's `model_type`."""
        return " | ".join(word for kind, word in ENDPOINT_TYPES.items() if kind in self.endpoint_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregatedOptions(WorkerOptions):
    """Disaggregation role of a worker."""

    disaggregation_mode: str | None = option(
        None,
        "--disaggregation-mode",
        None,
        "Phase of requests that this worker computes; default: agg, both phases",
        choices=tuple(mode.value for mode in DisaggregationMode),
    )
    is_prefill_worker: bool = option(False, "--is-prefill-worker", None, "Alias of --disaggregation-mode prefill")
    is_decode_worker: bool = option(False, "--is-decode-worker", None, "Alias of --disaggregation-mode decode")

    @property
    def role(self) -> DisaggregationMode:
        """The disaggregation role of the worker. Raises `ConfigError` for contradictory flags."""
        return mode_of(
            self.disaggregation_mode,
            is_prefill_worker=self.is_prefill_worker,
            is_decode_worker=self.is_decode_worker,
        )


def own_address() -> str:
    """Return the address at which other machines reach this one."""
    address = setting("DYN_HTTP_RPC_HOST", "", str) or setting("DYN_TCP_RPC_HOST", "", str)
    return address or socket.gethostbyname(socket.gethostname())


def grace_period_s() -> float:
    """Return how long a stopping worker serves callers with an outdated instance list: 5 if invalid, 0 if negative."""
    try:
        return max(0.0, setting("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 5.0, float))
    except ConfigError:
        return 5.0


def request_queue_limit() -> int:
    """Return the maximum number of requests that wait for a slot of `--engine-request-limit`."""
    limit = setting("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", 16, int)
    if limit < 0:
        raise ConfigError(f"DYN_DYNAMO_REQUEST_QUEUE_LIMIT={limit}: must be 0 or more")
    return limit
