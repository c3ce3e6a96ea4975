"""Plugin registry: which plugins may register, and when one without heartbeats is removed. Time is an argument."""

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.planner.config.planner_config import PlannerConfig, is_multiple
from dynamo.planner.config.plugins import AuthConfig, AuthSource, PluginStage
from dynamo.planner.core.pipeline import PluginSpec
from dynamo.planner.plugins.types import RegisterRequest, RegisterResponse

PLUGINS_MAX = 256
"""Registered plugins; each has a connection and takes part in every tick."""
BUILTIN_PREFIX = "builtin_"
"""Names of the planner's own plugins, which no other one may replace."""
ANONYMOUS = "anonymous"
AUTH_FAILED, PERMISSION_DENIED = "auth_failed", "permission_denied"


@dataclass(slots=True)
class PluginRegistration:
    """One registered plugin."""

    spec: PluginSpec
    endpoint: str
    subject: str
    """Identity of the caller that registered it."""
    heartbeat_at_s: float | None = None
    """None before the first heartbeat: a plugin that never sends one is not removed for that."""


def subject_of(auth: AuthConfig, token: str) -> str | None:
    """Return the identity that a token proves; None if it is not accepted."""
    for source in auth.trusted_sources:
        if source is AuthSource.ALLOW_UNAUTHENTICATED:
            return ANONYMOUS
        for secret, subject in auth.static_secrets.items():
            if token and subject and hmac.compare_digest(token.encode(), secret.encode()):
                return subject
    return None


def version_of(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a version such as 1.0; None if it has another form."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", text) else None


class PluginRegistry:
    """Registered plugins by id. One owner."""

    def __init__(self, config: PlannerConfig, connect: Callable[[str, str], object]) -> None:
        """`connect` opens the connection of a plugin, given its id and endpoint, and raises `ValueError` if it cannot."""
        self._config = config.plugin_registration
        self._interval_s = config.scheduling.scale_interval_seconds
        self._connect = connect
        self._plugins: dict[str, PluginRegistration] = {}

    def __contains__(self, plugin_id: str) -> bool:
        return plugin_id in self._plugins

    @property
    def registrations(self) -> list[PluginRegistration]:
        """The registered plugins."""
        return list(self._plugins.values())

    def register(self, request: RegisterRequest) -> RegisterResponse:
        """Register a plugin, or return the reason why not."""
        subject = subject_of(self._config.auth, request.auth_token)
        if subject is None:
            return RegisterResponse(reject_reason=AUTH_FAILED)
        reason = self._refused(request)
        if reason:
            return RegisterResponse(reject_reason=reason)
        try:
            self._connect(request.plugin_id, request.endpoint)
        except ValueError as error:
            return RegisterResponse(reject_reason=f"transport_build_failed: {error}")
        self._plugins[request.plugin_id] = PluginRegistration(spec_of(request), request.endpoint, subject)
        return RegisterResponse(accepted=True, negotiated_protocol_version=request.protocol_version)

    def _refused(self, request: RegisterRequest) -> str:
        """Return why a request of an accepted caller is refused; empty if it is not."""
        low, high = self._config.protocol_version_min, self._config.protocol_version_max
        requested, least, most = map(version_of, (request.protocol_version, low, high))
        if requested is None:
            return f"protocol_version_malformed: requested={request.protocol_version!r}"
        if least is None or most is None or not least <= requested <= most:
            return f"protocol_version_unsupported: requested={request.protocol_version}, supported=[{low},{high}]"
        window = request.observation_window_seconds
        if window and (window < 0 or not is_multiple(window, self._interval_s)):
            return (
                f"observation_window_misaligned: observation_window_seconds={window:g} must be 0 or a multiple of "
                f"scale_interval_seconds={self._interval_s:g}"
            )
        is_reserved = request.plugin_id.startswith(BUILTIN_PREFIX)
        if not request.plugin_id or is_reserved or request.plugin_type not in [one.value for one in PluginStage]:
            return f"plugin_rejected: plugin_id={request.plugin_id!r}, plugin_type={request.plugin_type!r}"
        if request.plugin_id in self._plugins:
            return "duplicate_plugin_id: must Unregister before re-Register"
        return f"too_many_plugins: at most {PLUGINS_MAX}" if len(self._plugins) >= PLUGINS_MAX else ""

    def heartbeat(self, plugin_id: str, token: str, now_s: float) -> str:
        """Note a heartbeat; return why it is refused, empty if it is not.

        An unknown plugin and one of another caller have the same reason, so that ids cannot be found out.
        """
        refused = self._not_owned(plugin_id, token)
        if not refused:
            self._plugins[plugin_id].heartbeat_at_s = now_s
        return refused

    def unregister(self, plugin_id: str, token: str) -> str:
        """Remove a plugin; return why that is refused, empty if it is not."""
        refused = self._not_owned(plugin_id, token)
        if not refused:
            del self._plugins[plugin_id]
        return refused

    def _not_owned(self, plugin_id: str, token: str) -> str:
        subject = subject_of(self._config.auth, token)
        if subject is None:
            return AUTH_FAILED
        plugin = self._plugins.get(plugin_id)
        return "" if plugin is not None and plugin.subject == subject else PERMISSION_DENIED

    def evict(self, now_s: float) -> list[str]:
        """Remove the plugins whose heartbeats have stopped, and return their ids."""
        limit_s = self._config.heartbeat_timeout_seconds * max(1, self._config.heartbeat_missed_threshold)
        gone = [
            plugin_id
            for plugin_id, one in self._plugins.items()
            if one.heartbeat_at_s is not None and now_s - one.heartbeat_at_s > limit_s
        ]
        for plugin_id in gone:
            del self._plugins[plugin_id]
        return gone


def spec_of(request: RegisterRequest) -> PluginSpec:
    """Return the pipeline's form of a registration."""
    return PluginSpec(
        plugin_id=request.plugin_id,
        stage=PluginStage(request.plugin_type),
        priority=request.priority,
        execution_interval_s=request.execution_interval_seconds,
        hold_policy=request.hold_policy,
        requires=tuple(request.requires_produced_fields),
    )
