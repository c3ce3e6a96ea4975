"""Settings of the plugin pipeline: cadence, external and in-process plugins, registration."""

import dataclasses
import enum
from typing import Any

from dynamo.planner.config.reader import setting_field
from dynamo.planner.plugins.types import HoldPolicy

REGISTRY_SOCKET = "unix:///var/run/dynamo/planner/registry.sock"


class PluginStage(enum.StrEnum):
    """Stage of the pipeline in which a plugin takes part."""

    PREDICT = "predict"
    PROPOSE = "propose"
    RECONCILE = "reconcile"
    CONSTRAIN = "constrain"


class AuthSource(enum.StrEnum):
    """A way to authenticate plugins that register themselves."""

    STATIC_SECRET = "static_secret"  # noqa: S105 - the name of a method
    ALLOW_UNAUTHENTICATED = "allow_unauthenticated"


class AdminMode(enum.StrEnum):
    """Authorization of administrative calls."""

    ALLOW_ALL = "allow_all"
    K8S_RBAC = "k8s_rbac"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExternalPluginEntry:
    """A gRPC plugin that the planner connects to at start."""

    plugin_id: str = setting_field(ge=1)
    plugin_type: PluginStage
    priority: int
    """Smaller numbers have precedence."""
    endpoint: str = setting_field(ge=1)
    """`grpc://host:port`."""
    auth_token: str = setting_field("", is_secret=True)
    protocol_version: str = "1.0"
    version: str = "v1"
    execution_interval_seconds: float = setting_field(0.0, ge=0)
    """Minimum interval between calls; 0 calls the plugin at each tick."""
    hold_policy: HoldPolicy = HoldPolicy.HOLD_LAST
    needs: list[str] = setting_field(list)
    requires_produced_fields: list[str] = setting_field(list)
    observation_window_seconds: float = setting_field(0.0, ge=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InProcessPluginSpec:
    """A plugin class that the planner imports and calls."""

    module: str
    class_: str = dataclasses.field(metadata={"aliases": ("class",), "dumped_as": "class"})
    plugin_id: str
    plugin_type: PluginStage
    priority: int
    execution_interval_seconds: float = 0.0
    hold_policy: HoldPolicy = HoldPolicy.ACCEPT_WHEN_IDLE
    needs: list[str] = setting_field(list)
    requires_produced_fields: list[str] = setting_field(list)
    observation_window_seconds: float = setting_field(0.0, ge=0)
    kwargs: dict[str, Any] = setting_field(dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The gRPC server at which plugins register themselves."""

    enabled: bool = False
    listen: str = REGISTRY_SOCKET
    allow_insecure: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """Cadence of the pipeline, and its external plugins."""

    tick_max_duration_seconds: float = setting_field(30.0, gt=0)
    external_plugins: list[ExternalPluginEntry] = setting_field(list)
    gateway: GatewayConfig = dataclasses.field(default_factory=GatewayConfig)
    scale_interval_seconds: float = setting_field(5.0, gt=0)
    """Seconds between ticks; divides the adjustment intervals in use."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Trusted ways to authenticate a plugin; without any, every registration is refused."""

    trusted_sources: list[AuthSource] = setting_field(list)
    static_secrets: dict[str, str] = setting_field(dict, is_secret=True)
    """Subject by secret."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """gRPC channels to plugins."""

    allow_insecure_grpc: bool = False
    request_timeout_seconds: float = setting_field(5.0, gt=0)
    keepalive_time_ms: int = 30_000
    max_message_size_bytes: int = 10 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminAuthConfig:
    """Authorization of administrative calls."""

    mode: AdminMode = AdminMode.ALLOW_ALL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PluginRegistrationConfig:
    """Registration of plugins: authentication, transport, heartbeats."""

    auth: AuthConfig = dataclasses.field(default_factory=AuthConfig)
    transport: TransportConfig = dataclasses.field(default_factory=TransportConfig)
    protocol_version_min: str = "1.0"
    protocol_version_max: str = "1.0"
    heartbeat_timeout_seconds: float = 15.0
    heartbeat_missed_threshold: int = 2
    in_process_plugins: list[InProcessPluginSpec] = setting_field(list)
    admin: AdminAuthConfig = dataclasses.field(default_factory=AdminAuthConfig)
