"""Cluster deployment: candidates as graphs of the cluster in which the profiler runs, one at a time."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from dynamo.core.errors import DynamoException
from dynamo.k8s.client import KubeClient, KubeRefused
from dynamo.k8s.kinds import GRAPHS, PODS
from dynamo.operator.reconcile.names import COMPONENT_TYPE, GRAPH
from dynamo.profiler.graph.assembly import TRUSTING_BACKENDS, add_tolerations, check_names, trust_remote_code
from dynamo.profiler.graph.components import graph_of
from dynamo.profiler.search import Configuration, EngineChoice
from dynamo.profiler.spec import ProfileSpec
from dynamo.profiler.thorough.deployment import (
    REQUEST_TIMEOUT_S,
    CannotDeploy,
    RunningDeployment,
    described,
    served_model,
)
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.replay.event_stream import EventStream

logger = logging.getLogger(__name__)

MANAGER = "dynamo-profiler"
LABEL = {"app": MANAGER}
SUCCESSFUL, FAILED = "successful", "failed"
POLL_S = 1.0
GONE_S = 300.0
"""Seconds until the pods of a measured candidate must have ended, so that the next one gets its GPUs."""
REPORT_EVERY_S = 30.0
FRONTEND_PORT = 8000
LOG_LINES = 2000
SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class ClusterDeployer:
    """Deploys candidates as graphs in one namespace."""

    client: KubeClient
    spec: ProfileSpec
    namespace: str
    prefix: str
    """Beginning of the names of graphs."""
    timeout_s: float

    @property
    def is_single(self) -> bool:
        """Return False: every parallelization that fits is a candidate."""
        return False

    def deployed(self, choice: EngineChoice, directory: Path) -> AbstractAsyncContextManager[RunningDeployment]:
        """Deploy a graph of one frontend and one engine."""
        return self._deployed(self.graph(choice), directory)

    def graph(self, choice: EngineChoice) -> KubeObject:
        """Return the graph of a candidate. Raise `ConfigError` for a name that is too long."""
        config = Configuration(prefill=None, decode=choice, ttft_ms=0.0, itl_ms=0.0, request_rate=0.0, osl=0)
        name = f"{self.prefix}-{choice.parallel.label()}"
        value = graph_of(self.spec, config, self.spec.backend, name)
        value["metadata"]["labels"] = dict(LABEL)
        add_tolerations(value, self.spec.tolerations)
        if self.spec.trusts_remote_code and self.spec.backend in TRUSTING_BACKENDS:
            trust_remote_code(value)
        check_names(value, "")
        return value

    async def remove_leftovers(self) -> None:
        """Delete the candidates of an earlier run that was killed."""
        labels = ",".join(f"{name}={value}" for name, value in LABEL.items())
        for one in (await self.client.list(GRAPHS, self.namespace, labels)).items:
            name = one["metadata"]["name"]
            if name.startswith(f"{self.prefix}-"):
                logger.info("deleting %s, which an earlier run left", name)
                await self.client.delete(GRAPHS, name, self.namespace)

    @contextlib.asynccontextmanager
    async def _deployed(self, value: KubeObject, directory: Path) -> AsyncIterator[RunningDeployment]:
        name = value["metadata"]["name"]
        try:
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self._apply(value)
                    pod = await self._frontend(name)
            except TimeoutError:
                raise CannotDeploy(f"not ready within {self.timeout_s:g} s: {await self._reason(name)}") from None
            url = f"http://{pod['status']['podIP']}:{FRONTEND_PORT}"
            stream = EventStream(url, REQUEST_TIMEOUT_S)
            try:
                yield await described(stream, url, await self._model(stream))
            finally:
                stream.close()
        finally:
            await self._removed(name, directory)

    async def _apply(self, value: KubeObject) -> None:
        """Create or update a graph; repeat it while the API server cannot call its webhooks."""
        while True:
            try:
                await self.client.apply(GRAPHS, value, self.namespace, manager=MANAGER)
            except KubeRefused as error:
                if error.code < SERVER_ERROR:
                    raise CannotDeploy(str(error)) from None
                logger.warning("%s: %s; retrying", value["metadata"]["name"], error)
                await asyncio.sleep(POLL_S)
            else:
                return

    async def _frontend(self, name: str) -> KubeObject:
        """Return the pod of the frontend when the graph is ready."""
        reported_s = time.monotonic()
        while True:
            graph = await self.client.get(GRAPHS, name, self.namespace) or {}
            state = (graph.get("status") or {}).get("state")
            pods = await self._pods(name, "frontend")
            if state == SUCCESSFUL and pods:
                return pods[0]
            if state == FAILED:
                raise CannotDeploy(await self._reason(name))
            if time.monotonic() - reported_s > REPORT_EVERY_S:
                reported_s = time.monotonic()
                logger.info("waiting for %s: %s", name, await self._reason(name))
            await asyncio.sleep(POLL_S)

    async def _model(self, stream: EventStream) -> str:
        """Return the model when the frontend serves it."""
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    found = await served_model(stream)
                    if found is not None:
                        return found
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise CannotDeploy(f"the frontend serves no model after {self.timeout_s:g} s") from None

    async def _pods(self, name: str, kind: str | None = None) -> list[KubeObject]:
        labels = f"{GRAPH}={name}" + (f",{COMPONENT_TYPE}={kind}" if kind else "")
        found = (await self.client.list(PODS, self.namespace, labels)).items
        return found if kind is None else [one for one in found if (one.get("status") or {}).get("podIP")]

    async def _reason(self, name: str) -> str:
        """Return why a graph is not ready: what its pods wait for, or its conditions."""
        waiting = []
        for pod in await self._pods(name):
            for one in (pod.get("status") or {}).get("containerStatuses") or ():
                for state in (one.get("state") or {}).values():
                    reason = state.get("message") or state.get("reason")
                    if reason:
                        waiting.append(f"{pod['metadata']['name']}: {reason}")
        graph = await self.client.get(GRAPHS, name, self.namespace) or {}
        conditions = (graph.get("status") or {}).get("conditions") or ()
        missing = [str(one.get("message")) for one in conditions if one.get("status") == "False" and one.get("message")]
        return "; ".join((waiting or missing)[:3]) or "no pod reports why"

    async def _removed(self, name: str, directory: Path) -> None:
        """Save the logs, delete the graph and wait until its pods are gone."""
        try:
            await self._save_logs(name, directory)
            await self.client.delete(GRAPHS, name, self.namespace)
            async with asyncio.timeout(GONE_S):
                while True:
                    if not await self._pods(name):
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            logger.warning("%s: its pods have not ended after %g s; the next candidate may lack GPUs", name, GONE_S)
        except DynamoException as error:
            logger.warning("%s: cannot be deleted: %s; delete it with kubectl", name, error)

    async def _save_logs(self, name: str, directory: Path) -> None:
        """Write the log of each pod to `{component}/{number}.log`."""
        numbers: dict[str, int] = {}
        for pod in await self._pods(name):
            component = str(pod["metadata"].get("labels", {}).get(COMPONENT_TYPE) or "pod")
            number = numbers[component] = numbers.get(component, -1) + 1
            with contextlib.suppress(DynamoException, OSError):  # A log is a help, not a result.
                text = await self.client.pod_log(pod["metadata"]["name"], self.namespace, lines=LOG_LINES)
                path = directory / component / f"{number}.log"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
