"""Plugin host: the plugins of one planner. It makes the calls of a tick and applies registrations between ticks."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence

from dynamo.core.boundaries import logged
from dynamo.core.tasks import TaskOwner
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.config.plugins import ExternalPluginEntry
from dynamo.planner.core.pipeline import PluginCall, PluginPipeline, PluginReply, PluginSpec
from dynamo.planner.core.reasons import ExecuteAction
from dynamo.planner.core.record import Recording
from dynamo.planner.plugin_transport.callers import GrpcPlugin, PluginCaller, PluginCallError, load_plugin
from dynamo.planner.plugin_transport.gateway import PluginGateway
from dynamo.planner.plugin_transport.registry import BUILTIN_PREFIX, PluginRegistry
from dynamo.planner.plugins.types import BootstrapRequest, RegisterRequest, StageResponse

logger = logging.getLogger(__name__)
audit_logger = logging.getLogger("dynamo.planner.audit")


class PluginHost:
    """Connections of the plugins that the configuration names, and of those that register themselves."""

    def __init__(
        self,
        config: PlannerConfig,
        clock: Callable[[], float] = time.monotonic,
        on_call: Callable[[str, str, float], None] | None = None,
    ) -> None:
        """`on_call` receives plugin, stage and seconds of each call that succeeded.

        Raise `ConfigError` for an in-process plugin that cannot be loaded, and for a gateway that cannot be used.
        """
        self._config = config
        self._clock = clock
        self._on_call = on_call
        self._tasks = TaskOwner("planner plugins")
        self._callers: dict[str, PluginCaller] = {}
        self._registry = PluginRegistry(config, self._connect)
        self._in_process: list[PluginSpec] = []
        for spec in config.plugin_registration.in_process_plugins:
            self._callers[spec.plugin_id] = load_plugin(spec)
            self._in_process.append(
                PluginSpec(
                    plugin_id=spec.plugin_id,
                    stage=spec.plugin_type,
                    priority=spec.priority,
                    execution_interval_s=spec.execution_interval_seconds,
                    hold_policy=spec.hold_policy,
                    requires=tuple(spec.requires_produced_fields),
                )
            )
        gateway = config.scheduling.gateway
        self.gateway = PluginGateway(gateway, self._registry, clock) if gateway.enabled else None

    @property
    def specs(self) -> list[PluginSpec]:
        """The present plugins, for the planner core."""
        return [*self._in_process, *(one.spec for one in self._registry.registrations)]

    async def start(self) -> None:
        """Register the configured plugins and open the gateway. A plugin that is refused or absent is logged."""
        for entry in self._config.scheduling.external_plugins:
            response = self._registry.register(_request(entry))
            if not response.accepted:
                logger.warning("plugin %s (%s) was not registered: %s", entry.plugin_id, entry.endpoint, response.reject_reason)  # fmt: skip
        await asyncio.gather(*(self._bootstrap(plugin_id) for plugin_id in self._callers))
        if self.gateway is not None:
            await self.gateway.start()
            logger.info("plugins register at %s", self.gateway.address)

    def apply_changes(self, pipeline: PluginPipeline) -> bool:
        """Register new plugins in the pipeline and remove those that left or sent no heartbeats, between two ticks.

        Returns whether anything changed: a decision record then has to start again, from a checkpoint.
        """
        for plugin_id in self._registry.evict(self._clock()):
            logger.warning("plugin %s removed: its heartbeats have stopped", plugin_id)
        wanted = {one.plugin_id: one for one in self.specs}
        present = {one.plugin_id: one for one in pipeline.plugins if not one.plugin_id.startswith(BUILTIN_PREFIX)}
        for plugin_id in present.keys() - wanted.keys():
            pipeline.unregister(plugin_id)
        for plugin_id, spec in wanted.items():
            if present.get(plugin_id) != spec:
                pipeline.register(spec)
        for plugin_id in self._callers.keys() - wanted.keys():
            self._tasks.start(self._callers.pop(plugin_id).close(), f"close plugin {plugin_id}")
        return present != wanted

    async def finish(self, recording: Recording) -> None:
        """Make the calls of a tick until it is decided; calls after the tick's time limit fail at once."""
        ends_s = self._clock() + self._config.scheduling.tick_max_duration_seconds
        while recording.decision is None:
            recording.reply(await self._answers(recording.calls, ends_s))
        decision = recording.decision
        for one in decision.stages:
            for plugin_id, reason in one.skipped:
                event = "plugin_circuit_open" if reason == "circuit open" else "plugin_degraded"
                _audit(event, plugin_id=plugin_id, stage=one.stage.value, reason=reason)
            if one.outcome is not None and one.outcome.dropped_sets:
                _audit("plugin_constrain_set_dropped", roles=list(one.outcome.dropped_sets))
        if decision.action is ExecuteAction.SKIP_SHORT_CIRCUIT:
            _audit("execute_skipped_rejected", plugin_id=decision.rejected_by, reason=decision.reject_reason)

    async def close(self) -> None:
        """Close the gateway and all connections."""
        if self.gateway is not None:
            await self.gateway.stop()
        await self._tasks.cancel_and_wait()
        for plugin_id, caller in self._callers.items():
            with logged(logger, "failed to close plugin %s", plugin_id):  # The others are closed all the same.
                await caller.close()

    def _connect(self, plugin_id: str, endpoint: str) -> None:
        if any(plugin_id == one.plugin_id for one in self._in_process):
            raise ValueError(f"plugin {plugin_id}: is a plugin of the planner's process")
        made = GrpcPlugin(plugin_id, endpoint, self._config.plugin_registration.transport)
        if plugin_id in self._callers:  # It has left and comes back before a tick has noticed.
            self._tasks.start(self._callers.pop(plugin_id).close(), f"close plugin {plugin_id}")
        self._callers[plugin_id] = made

    async def _bootstrap(self, plugin_id: str) -> None:
        """Make the first call of a plugin, which it need not implement."""
        timeout_s = self._config.plugin_registration.transport.request_timeout_seconds
        try:
            await self._callers[plugin_id].call("Bootstrap", BootstrapRequest(), timeout_s)
        except PluginCallError as error:
            logger.debug("plugin %s: Bootstrap: %s", plugin_id, error)

    async def _answers(self, calls: Sequence[PluginCall], ends_s: float) -> list[PluginReply]:
        return await asyncio.gather(*(self._answer(one, ends_s) for one in calls))

    async def _answer(self, call: PluginCall, ends_s: float) -> PluginReply:
        """Return the reply of a plugin, or the reason why there is none."""
        plugin_id, stage = call.spec.plugin_id, call.spec.stage.value
        started_s = self._clock()
        caller = self._callers.get(plugin_id)
        context = call.request.context
        tick_id = context.request_id if context else ""
        limit_s = self._config.plugin_registration.transport.request_timeout_seconds
        if caller is None or ends_s <= started_s:
            reason = "not registered any more" if caller is None else "timeout: the tick's time limit has passed"
            _audit("plugin_degraded", tick_id=tick_id, plugin_id=plugin_id, stage=stage, reason=reason)
            return PluginReply(None, reason)
        try:
            response = await caller.call(stage.capitalize(), call.request, min(limit_s, ends_s - started_s))
        except PluginCallError as error:
            event = "plugin_timeout" if str(error).startswith("timeout") else "plugin_degraded"
            _audit(event, tick_id=tick_id, plugin_id=plugin_id, stage=stage, reason=str(error))
            return PluginReply(None, str(error))
        assert isinstance(response, StageResponse)
        kind = getattr(response, "result_kind", "") or "predictions"
        event = "plugin_rejected" if kind == "reject" else "plugin_evaluated"
        seconds = round(self._clock() - started_s, 6)
        if self._on_call is not None:
            self._on_call(plugin_id, stage, seconds)
        _audit(event, tick_id=tick_id, plugin_id=plugin_id, stage=stage, result=kind, seconds=seconds)
        return PluginReply(response)


def _audit(event: str, **fields: object) -> None:
    """Write a line of the audit log."""
    audit_logger.info("AUDIT %s", json.dumps({"event": event, **fields}))


def _request(entry: ExternalPluginEntry) -> RegisterRequest:
    return RegisterRequest(
        plugin_id=entry.plugin_id,
        plugin_type=entry.plugin_type.value,
        priority=entry.priority,
        endpoint=entry.endpoint,
        version=entry.version,
        execution_interval_seconds=entry.execution_interval_seconds,
        hold_policy=entry.hold_policy,
        needs=entry.needs,
        protocol_version=entry.protocol_version,
        auth_token=entry.auth_token,
        requires_produced_fields=entry.requires_produced_fields,
        observation_window_seconds=entry.observation_window_seconds,
    )
