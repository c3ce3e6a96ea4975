"""Run of a recipe: applies its objects in order, waits for each, sends a request, runs the benchmark, collects the results."""

import asyncio
import enum
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.cli.cluster import MANAGER, connected, kind_of, namespace_of
from dynamo.cli.manifests import Manifest, in_order
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.progress import activity
from dynamo.k8s.client import KubeClient, KubeRefused
from dynamo.k8s.kinds import GRAPHS, JOBS, PODS
from dynamo.operator.validation.facts import part
from dynamo.ops.recipes.parts import GRAPH_KIND, RecipeFiles, SourcedObject, served_models
from dynamo.ops.report import CheckRow, exit_status, failed, passed, row_value, skipped

if TYPE_CHECKING:
    from dynamo.cli.recipe import RecipeRunConfig

POLL_S = 2.0
REQUEST_TIMEOUT_S = 120.0
LOG_LINES = 2000
LEDGER, SMOKE_TEST = "deployment_ledger.json", "smoke_test_artifact.json"
PROMPT = "Reply with one short sentence."
REQUEST_TOKENS = 32


class StepKind(enum.Enum):
    """What a step does."""

    APPLY = "apply"
    JOB = "job"
    GRAPH = "graph"
    REQUEST = "request"
    BENCHMARK = "benchmark"


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step of a run."""

    kind: StepKind
    objects: tuple[SourcedObject, ...] = ()

    @property
    def text(self) -> str:
        """Return the step in words."""
        names = ", ".join(f"{one.kind}/{one.name}" for one in self.objects)
        return {
            StepKind.APPLY: f"apply {names}",
            StepKind.JOB: f"apply {names} and wait until it is complete",
            StepKind.GRAPH: f"apply {names} and wait until it is ready",
            StepKind.REQUEST: "list the models and send one chat request",
            StepKind.BENCHMARK: f"apply {names}, wait until it is complete, and collect its output",
        }[self.kind]


def steps_of(files: RecipeFiles, *, has_benchmark: bool, skips_download: bool) -> list[RunStep]:
    """Return the steps: claims and other objects, download, graphs, request, benchmark. Pure."""
    cache = [one for one in files.cache if one.kind != "Job"]
    jobs = [one for one in files.cache if one.kind == "Job"]
    others = [one for one in files.deploy if one.kind != GRAPH_KIND]
    first = in_order([Manifest(one.file, one.value) for one in (*cache, *others)])
    steps = [RunStep(StepKind.APPLY, tuple(SourcedObject(one.file, one.value) for one in first))] if first else []
    if not skips_download:
        steps += [RunStep(StepKind.JOB, (one,)) for one in jobs]
    steps += [RunStep(StepKind.GRAPH, (one,)) for one in files.graphs]
    steps.append(RunStep(StepKind.REQUEST))
    if has_benchmark and files.perf:
        steps.append(RunStep(StepKind.BENCHMARK, files.perf))
    return steps


def as_text(steps: Sequence[RunStep]) -> str:
    """Return the numbered steps. Pure."""
    return "\n".join(f"{number}. {step.text}" for number, step in enumerate(steps, 1))


def job_state(job: dict[str, Any]) -> str:
    """Return the numbers of active and failed pods of a job in words. Pure."""
    status = part(job, "status")
    failures = status.get("failed")
    return f"{status.get('active') or 0} active pods" + (f", {failures} failed" if failures else "")


class RecipeRun:
    """One run: the cluster, the time limits, and the results so far."""

    def __init__(self, client: KubeClient, namespace: str, config: "RecipeRunConfig", output: Path) -> None:
        self._client = client
        self._namespace = namespace
        self._config = config
        self._output = output
        self._show: Callable[[str], None] = lambda _: None
        self.rows: list[CheckRow] = []

    async def step(self, step: RunStep, files: RecipeFiles) -> None:
        """Carry out one step and add its row."""
        started = time.monotonic()
        with activity(step.text) as self._show:
            try:
                row = await self._carry_out(step, files)
            except KubeRefused as error:
                row = failed(step.kind.value, f"{step.text}: {error}", "correct the object or the permissions")
        self.rows.append(row)
        print(f"{row.status.value}  {row.check}  {row.evidence} ({time.monotonic() - started:.0f} s)", flush=True)
        if row.remedy:
            print(f"      -> {row.remedy}")

    async def _carry_out(self, step: RunStep, files: RecipeFiles) -> CheckRow:
        for one in step.objects:
            await self._apply(one)
        names = ", ".join(f"{one.kind}/{one.name}" for one in step.objects)
        match step.kind:
            case StepKind.APPLY:
                return passed("apply", names)
            case StepKind.JOB:
                return await self._await_job(step.objects[0], self._config.download_timeout_s)
            case StepKind.GRAPH:
                return await self._await_graph(step.objects[0])
            case StepKind.REQUEST:
                return await asyncio.to_thread(self._request, files)
            case StepKind.BENCHMARK:
                return await self._benchmark(step)

    async def _apply(self, one: SourcedObject) -> None:
        manifest = Manifest(one.file, one.value)
        kind = await kind_of(self._client, manifest)
        where = namespace_of(manifest, kind, self._namespace)
        if one.kind == "Job" and await self._client.get(JOBS, one.name, where) is not None:
            return  # The template of a job cannot be changed; one that is there is awaited.
        await self._client.apply(kind, one.value, where, manager=MANAGER)

    async def _await_job(self, job: SourcedObject, limit_s: float) -> CheckRow:
        deadline = time.monotonic() + limit_s
        check, where = f"job {job.name}", self._where(job)
        while True:
            found = await self._client.get(JOBS, job.name, where) or {}
            conditions = {
                one.get("type"): one
                for one in part(found, "status").get("conditions") or ()
                if one.get("status") == "True"
            }
            self._show(f"waiting for {check}: {job_state(found)}")
            if "Complete" in conditions:
                return passed(check, "complete")
            if "Failed" in conditions:
                reason = conditions["Failed"].get("message") or conditions["Failed"].get("reason") or "failed"
                return failed(check, str(reason), f"run: dynamo troubleshoot --namespace {where}; then delete the job")
            if time.monotonic() > deadline:
                return failed(
                    check, f"not complete after {limit_s:g} s", f"run: dynamo troubleshoot --namespace {where}"
                )
            await asyncio.sleep(POLL_S)

    async def _await_graph(self, graph: SourcedObject) -> CheckRow:
        limit_s = self._config.ready_timeout_s
        deadline = time.monotonic() + limit_s
        check, where = f"graph {graph.name}", self._where(graph)
        advice = f"run: dynamo troubleshoot {graph.name} --namespace {where}"
        while True:
            found = await self._client.get(GRAPHS, graph.name, where) or {}
            state = str(part(found, "status").get("state") or "unknown")
            is_current = part(found, "status").get("observedGeneration") == part(found, "metadata").get("generation")
            self._show(f"waiting for {check}: state {state}")
            if state == "successful" and is_current:
                return passed(check, "ready")
            if state == "failed" and is_current:
                return failed(check, "state failed", advice)
            if time.monotonic() > deadline:
                return failed(check, f"state {state} after {limit_s:g} s", advice)
            await asyncio.sleep(POLL_S)

    def _request(self, files: RecipeFiles) -> CheckRow:
        """List the models and send one request; keep both in the artifact of the smoke test."""
        graph = files.graphs[0].name
        if self._config.url is None:
            forward = f"kubectl port-forward service/{graph}-frontend 8000:8000, then --url http://localhost:8000"
            return skipped("request", f"no --url; {forward}")
        from dynamo.ops.router_health import chat_once

        result = chat_once(
            self._config.url,
            prefer=served_models(files),
            prompt=PROMPT,
            max_tokens=REQUEST_TOKENS,
            timeout_s=REQUEST_TIMEOUT_S,
        )
        self._write(
            SMOKE_TEST,
            {"api_request": result.request, "api_response": result.response, "success": int(result.is_success)},
        )
        if not result.is_success:
            return failed("request", result.error, f"run: dynamo troubleshoot {graph}")
        return passed("request", f"{result.model} answered with {result.tokens} tokens")

    async def _benchmark(self, step: RunStep) -> CheckRow:
        row = passed("benchmark", "applied")
        for one in step.objects:
            if one.kind == "Job":
                row = await self._await_job(one, self._config.benchmark_timeout_s)
                await self._collect(one)
        return row

    async def _collect(self, job: SourcedObject) -> None:
        """Write the logs of a job's pods."""
        pods = (await self._client.list(PODS, self._where(job), f"job-name={job.name}")).items
        for pod in pods:
            name = str(part(pod, "metadata").get("name"))
            for container in part(pod, "spec").get("containers") or ():
                try:
                    text = await self._client.pod_log(
                        name, self._where(job), container=str(container.get("name")), lines=LOG_LINES
                    )
                except DynamoException as error:
                    text = f"not available: {error}\n"
                self._output.mkdir(parents=True, exist_ok=True)
                (self._output / f"logs-{name}-{container.get('name')}.txt").write_text(text, encoding="utf-8")

    def _where(self, one: SourcedObject) -> str:
        return str(part(one.value, "metadata").get("namespace") or self._namespace)

    def _write(self, name: str, value: Any) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        (self._output / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    def write_ledger(self, steps: Sequence[RunStep]) -> None:
        """Write what was done. Raise `OSError`."""
        done = [{"step": step.text, **row_value(row)} for step, row in zip(steps, self.rows, strict=False)]
        left = [{"step": step.text, "status": "SKIP"} for step in steps[len(self.rows) :]]
        self._write(LEDGER, {"steps": [*done, *left], "namespace": self._namespace})


async def run_steps(steps: Sequence[RunStep], files: RecipeFiles, config: "RecipeRunConfig", output: Path) -> int:
    """Carry out the steps until one fails; return the exit status. Raise `ConfigError` for an unwritable directory."""
    async with connected(config.namespace) as (client, namespace):
        run = RecipeRun(client, namespace, config, output)
        try:
            for step in steps:
                await run.step(step, files)
                if exit_status(run.rows):
                    break
            run.write_ledger(steps)
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}") from None
    print(f"results: {output}")
    return exit_status(run.rows)
