"""Flags of workers: runtime, parsers, structural tags, media and TLS."""

import argparse
import logging
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import Any, Literal

import msgspec

from dynamo.backend.config import WorkerOptions
from dynamo.common.configuration.arg_group import ArgGroup
from dynamo.common.configuration.config_base import ConfigBase
from dynamo.common.configuration.flags import Flag, add_flags, declared
from dynamo.common.configuration.utils import FALSE, TRUE, env_or_default, set_env
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.common.utils.output_modalities import OutputModality
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.parsers.registry import reasoning_names, tool_call_names

logger = logging.getLogger(__name__)

_fpm_trace_invalid_warning_emitted = False

XGRAMMAR_WITH_ANY_ORDER = (0, 2, 3)
"""First release of XGrammar that accepts the arguments of a tool in any order."""


class StructuralTagConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Guided decoding of tool calls."""

    scope: Literal["auto", "always"] = "always"
    schema: Literal["auto", "strict"] = "auto"
    allow_tool_calls_with_structured_output: bool = False
    exclude_special_tokens: bool | None = None
    reasoning_boundary: Literal["auto", "structural_tag", "backend"] = "auto"
    tool_arguments_any_order: bool = False


def _structural_tag(text: str) -> StructuralTagConfig | bool:
    """Parse a boolean or a JSON object. Raise `argparse.ArgumentTypeError`."""
    word = text.strip().lower()
    if word in TRUE:
        return StructuralTagConfig()
    if word and word in FALSE:
        return False
    try:
        return msgspec.json.decode(text, type=StructuralTagConfig)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


BACKENDS = {"choices": ("kubernetes", "etcd", "file", "mem")}
TRANSPORTS: dict[str, dict[str, Any]] = {
    "--discovery-backend": {**BACKENDS, "default": "etcd"},
    "--response-plane": {"choices": ("tcp", "quic")},
    "--event-plane": {"default": None},
}
"""What differs from our own declarations: values that only upstream's processes accept, and unset defaults."""
TRANSPORT_FLAGS = declared(
    WorkerOptions, ["--discovery-backend", "--request-plane", "--response-plane", "--event-plane"], TRANSPORTS
)
# fmt: off
RUNTIME_FLAGS = (
    *declared(WorkerOptions, ["--namespace", "--endpoint", "--exclude-tools-when-tool-choice-none", "--custom-jinja-template",
        "--endpoint-types", "--dump-config-to", "--engine-request-limit", "--dyn-default-thinking-mode"],
        {"--endpoint-types": {"default": "chat,completions"}, "--dyn-default-thinking-mode": {"dest": None}}),
    *TRANSPORT_FLAGS,
    Flag("--kv-state-endpoint", "DYN_KV_STATE_ENDPOINT", None, "Endpoint that owns the worker's KV events; without, its own"),
    Flag("--fpm-trace", "DYN_FPM_TRACE", False, "Write forward-pass metrics to compressed JSONL files"),
    Flag("--connector", "DYN_CONNECTOR", [], "KV connectors of the engine", extra={"nargs": "*"}),
    Flag("--dyn-structural-tag", "DYN_STRUCTURAL_TAG", None,
        "Guided decoding of tool calls: true, false, or a JSON object with scope, schema and other keys. Schema auto follows "
        "tools that have strict omitted or true; schema strict follows all tools, overriding strict=false",
        _structural_tag, extra={"nargs": "?", "const": "true"}),
    Flag("--multimodal-embedding-cache-capacity-gb", "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB", 0,
        "GB for encoder outputs of images; 0 disables the cache", float),
    Flag("--multimodal-embedding-cache-publisher", "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER", False,
        "Send the keys of that cache to the KV routers"),
    Flag("--output-modalities", "DYN_OUTPUT_MODALITIES", ["text"], "Outputs of the model: text, image, audio, video",
        extra={"nargs": "*"}),
    Flag("--media-output-fs-url", "DYN_MEDIA_OUTPUT_FS_URL", "file:///tmp/dynamo_media", "File system for generated media"),
    Flag("--media-output-http-url", "DYN_MEDIA_OUTPUT_HTTP_URL", None, "Prefix of the URLs of generated media"),
    Flag("--health-check-payload", "DYN_HEALTH_CHECK_PAYLOAD", None, "Request of the health check: JSON, or @FILE with JSON"),
)
TLS_FLAGS = declared(WorkerOptions, [
    *(f"--tcp-tls-{name}-path" for name in ("cert", "key", "ca-cert", "client-cert", "client-key", "client-ca-cert")),
    "--nats-tls-ca-cert-path", "--nats-tls-insecure", "--nats-tls-client-cert-path", "--nats-tls-client-key-path"])
HANDSHAKE = "--tcp-tls-handshake-timeout"
WORKER_TLS_FLAGS = declared(WorkerOptions, ["--tcp-tls-insecure", "--tcp-tls-server-name", HANDSHAKE],
    {HANDSHAKE: {"default": None, "type": int, "dest": "tcp_tls_handshake_timeout_secs"}})
# fmt: on


class DynamoRuntimeConfig(ConfigBase):
    """Settings of a worker."""

    namespace: str
    endpoint: str | None = None
    kv_state_endpoint: str | None = None
    discovery_backend: str
    request_plane: str
    response_plane: str = "tcp"
    event_plane: str | None = None
    fpm_trace: bool = False
    connector: list[str]
    enable_local_indexer: bool = True
    dyn_tool_call_parser: str | None = None
    dyn_reasoning_parser: str | None = None
    dyn_default_thinking_mode: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    dyn_enable_structural_tag: bool | None = None
    dyn_structural_tag_scope: Literal["auto", "always"] | None = None
    dyn_structural_tag_schema: Literal["auto", "strict"] | None = None
    dyn_structural_tag: StructuralTagConfig | bool | None = None
    structural_tag: dict[str, object] | None = None
    custom_jinja_template: str | None = None
    endpoint_types: str
    dump_config_to: str | None = None
    multimodal_embedding_cache_capacity_gb: float
    multimodal_embedding_cache_publisher: bool = False
    output_modalities: list[str]
    media_output_fs_url: str = "file:///tmp/dynamo_media"
    media_output_http_url: str | None = None
    health_check_payload: str | None = None
    engine_request_limit: int | None = None
    tcp_tls_cert_path: str | None = None
    tcp_tls_key_path: str | None = None
    tcp_tls_ca_cert_path: str | None = None
    tcp_tls_insecure: bool = False
    tcp_tls_server_name: str | None = None
    tcp_tls_handshake_timeout_secs: int | None = None
    tcp_tls_client_cert_path: str | None = None
    tcp_tls_client_key_path: str | None = None
    tcp_tls_client_ca_cert_path: str | None = None
    nats_tls_ca_cert_path: str | None = None
    nats_tls_insecure: bool = False
    nats_tls_client_cert_path: str | None = None
    nats_tls_client_key_path: str | None = None

    def validate(self) -> None:
        """Resolve the namespace and the structural tag, check the values, and export settings of the transports."""
        self.namespace = get_worker_namespace(self.namespace)
        self.structural_tag = resolve_structural_tag_config(self)
        for name in self.output_modalities or ():
            if name.lower() not in OutputModality.valid_names():
                expected = ", ".join(sorted(OutputModality.valid_names()))
                raise ConfigError(f"--output-modalities {name}: expected one or more of {expected}")
        limits = {"--engine-request-limit": self.engine_request_limit, HANDSHAKE: self.tcp_tls_handshake_timeout_secs}
        for flag, value in limits.items():
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: must be at least 1")
        self._export()

    def _export(self) -> None:
        """Set the variables that the runtime and child processes read."""
        global _fpm_trace_invalid_warning_emitted  # noqa: PLW0603 -- one warning for each process
        given = environ().get("DYN_FPM_TRACE")
        if self.fpm_trace:
            set_env("DYN_FPM_TRACE", "1")
        elif given is not None:
            is_valid = given.strip().lower() in TRUE | FALSE
            if not (is_valid or _fpm_trace_invalid_warning_emitted or environ().get("DYN_FORWARDPASS_METRIC_PORT")):
                _fpm_trace_invalid_warning_emitted = True
                logger.warning("Invalid DYN_FPM_TRACE value %r: expected true or false; nothing is written", given)
            set_env("DYN_FPM_TRACE", "0")
        set_env("DYN_RESPONSE_PLANE", self.response_plane)
        export_tls(self, (*TLS_FLAGS, *WORKER_TLS_FLAGS))


def export_tls(config: ConfigBase, flags: tuple[Flag, ...]) -> None:
    """Set the variables of TLS flags that have a value; remove those of disabled ones."""
    for flag in flags:
        value = getattr(config, flag.dest or flag.name.lstrip("-").replace("-", "_"))
        if isinstance(flag.default, bool):
            set_env(flag.env, "1" if value else None)
        elif value not in (None, ""):
            set_env(flag.env, str(value))


class DynamoRuntimeArgGroup(ArgGroup):
    """Flags of a worker."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`."""
        # fmt: off
        parsers = (
            Flag("--dyn-tool-call-parser", "DYN_TOOL_CALL_PARSER", None, "Parser of tool calls", choices=tool_call_names()),
            Flag("--dyn-reasoning-parser", "DYN_REASONING_PARSER", None, "Parser of reasoning", choices=reasoning_names()),
        )
        # fmt: on
        group = add_flags(parser, "Dynamo Runtime Options", (*RUNTIME_FLAGS, *parsers, *TLS_FLAGS, *WORKER_TLS_FLAGS))
        group.add_argument(  # The next three are the former names of parts of --dyn-structural-tag.
            "--dyn-enable-structural-tag",
            action=argparse.BooleanOptionalAction,
            default=env_or_default("DYN_ENABLE_STRUCTURAL_TAG", None, value_type=bool),
            help=argparse.SUPPRESS,
        )
        for name, choices in (("scope", ["auto", "always"]), ("schema", ["auto", "strict"])):
            group.add_argument(
                f"--dyn-structural-tag-{name}",
                default=env_or_default(f"DYN_STRUCTURAL_TAG_{name.upper()}", None, value_type=str),
                choices=choices,
                help=argparse.SUPPRESS,
            )


def resolve_structural_tag_config(runtime_config: DynamoRuntimeConfig) -> dict[str, object] | None:
    """Return the structural tag for the model card; None if disabled. Raise `ValueError` for contradicting flags."""
    chosen: Any = runtime_config.dyn_structural_tag
    enabled = runtime_config.dyn_enable_structural_tag
    parts = {"scope": runtime_config.dyn_structural_tag_scope, "schema": runtime_config.dyn_structural_tag_schema}
    parts = {name: value for name, value in parts.items() if value is not None}
    former = [f"--dyn-structural-tag-{name}" for name in parts]
    if enabled is not None:
        former.append("--dyn-enable-structural-tag")
    if former:
        logger.warning("%s: deprecated; set --dyn-structural-tag instead", ", ".join(former))
    if chosen is None:
        chosen = False if enabled is False else msgspec.convert(parts, StructuralTagConfig)
    elif parts or enabled is (chosen is False):
        raise ConfigError(f"--dyn-structural-tag cannot be combined with {', '.join(former)}")
    if chosen is False:
        return None
    tag = StructuralTagConfig() if chosen is True else chosen
    if tag.tool_arguments_any_order:
        _require_xgrammar()
    found: dict[str, object] = msgspec.to_builtins(tag)
    return found


def _require_xgrammar() -> None:
    """Raise `ConfigError` if XGrammar is missing or too old for arguments in any order."""
    minimum = ".".join(map(str, XGRAMMAR_WITH_ANY_ORDER))
    try:
        found = distribution_version("xgrammar")
    except PackageNotFoundError:
        found = "none"
    release = [int(part) if part.isdecimal() else 0 for part in found.split(".")]
    if tuple(release[:3]) < XGRAMMAR_WITH_ANY_ORDER:
        raise ConfigError(f"tool_arguments_any_order requires XGrammar >= {minimum}; installed: {found}")
