"""The released planner's pure parts behind one line of JSON per call; runs in the environment of `benchmarks.planner_peer`.

Reads lines `{"function": NAME, "cases": [...]}` from standard input and writes a JSON list of results for each. This file only calls the
released functions; `aisimulate` and `aisimulate_core`, which are not published, are import stubs.
"""

import asyncio
import importlib.abc
import importlib.machinery
import json
import logging
import sys
import warnings
from unittest import mock


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import `aisimulate` and `aisimulate_core` as objects without behaviour."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("aisimulate", "aisimulate_core"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Stubs())
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)


def config(case):
    """Return the configuration that a JSON object gives, or the error."""
    from pydantic import ValidationError

    from dynamo.planner.config.planner_config import PlannerConfig

    try:
        made = PlannerConfig(**case)
    except ValidationError as error:
        fields = [".".join(str(part) for part in one["loc"]) for one in error.errors()]
        return {"error": "; ".join(one["msg"] for one in error.errors()), "fields": fields}
    return {"config": made.model_dump(mode="json")}


def predictor(case):
    """Return the prediction after each value."""
    from dynamo.planner.core.load.predictors import LOAD_PREDICTORS

    from dynamo.planner.config.planner_config import PlannerConfig

    made = LOAD_PREDICTORS[case["config"]["load_predictor"]](PlannerConfig(**case["config"]))
    found = []
    for index, value in enumerate(case["values"]):
        if index == case.get("reset_at"):
            made.reset_idle_skip()
        made.add_data_point(float("nan") if value is None else value)
        if index >= case.get("predict_from", 0):
            found.append(float(made.predict_next()))
    return [*found, float(made.get_last_value())]


def step(row):
    """Return forward-pass metrics from [worker, rank, wall, prefill requests, tokens, decode requests, kv, queued …]."""
    from dynamo.common.forward_pass_metrics import ForwardPassMetrics, QueuedRequestMetrics, ScheduledRequestMetrics

    worker, rank, wall, prompts, tokens, decodes, kv, queued_prompts, queued_tokens, queued_decodes, queued_kv = row
    return ForwardPassMetrics(
        worker_id=worker,
        dp_rank=rank,
        counter_id=1,
        wall_time=wall,
        scheduled_requests=ScheduledRequestMetrics(
            num_prefill_requests=prompts,
            sum_prefill_tokens=tokens,
            num_decode_requests=decodes,
            sum_decode_kv_tokens=kv,
        ),
        queued_requests=QueuedRequestMetrics(
            num_prefill_requests=queued_prompts,
            sum_prefill_tokens=queued_tokens,
            num_decode_requests=queued_decodes,
            sum_decode_kv_tokens=queued_kv,
        ),
    )


def steps(rows):
    """Return the steps by worker and rank."""
    return {(row[0], row[1]): step(row) for row in rows}


class LinearModel:
    """A step model in place of the simulator's: seconds are linear in prefill tokens, decode requests and KV tokens."""

    def __init__(self, coefficients):
        self.coefficients = coefficients
        self.count = 0

    def estimate_forward_pass_time_ms(self, ranks):
        base, per_token, per_request, per_kv = self.coefficients
        (one,) = ranks
        load = one["scheduled_requests"]
        seconds = (
            base
            + per_token * load["sum_prefill_tokens"]
            + per_request * load["num_decode_requests"]
            + per_kv * load["sum_decode_kv_tokens"]
        )
        return seconds * 1000

    def tune_with_fpms(self, iterations):
        self.count += len(iterations)

    def diagnostics(self):
        return {"readiness": "ready", "retained_observations": self.count, "source": "linear"}


def install_linear(coefficients):
    """Make the released performance model use the linear step model."""
    from dynamo.planner.core.perf_model.engine_query import AISCoreEnginePerfModel

    from dynamo.planner.core.perf_model import ais_adapter

    def best_available(*, ais_config, worker_type, limits, max_observations, attention_dp_size):
        return AISCoreEnginePerfModel(
            model=LinearModel(coefficients),
            worker_type=worker_type,
            limits=limits,
            attention_dp_size=attention_dp_size,
            max_observations=max_observations,
        )

    ais_adapter.AISCoreEnginePerfModel.best_available = staticmethod(best_available)
    ais_adapter.PlannerEnginePerfModel._build_ais_config = lambda self: {}


def regression(case):
    """Return the samples kept and the predictions of a regression model."""
    from dynamo.planner.core.perf_model import AggRegressionModel, DecodeRegressionModel, PrefillRegressionModel

    kinds = {"prefill": PrefillRegressionModel, "decode": DecodeRegressionModel, "aggregated": AggRegressionModel}
    model = kinds[case["role"]](case["samples"], case["min"], case["buckets"])
    for row in case["steps"]:
        model.add_observation(step(row))
    if not model.has_sufficient_data() or not model._ensure_fitted():
        return {"ready": model.has_sufficient_data(), "seconds": None}
    if case["role"] == "prefill":
        found = [model._predict_wall_time(tokens) for tokens, _, _ in case["queries"]]
    elif case["role"] == "decode":
        found = [model._predict_2d(requests, kv) for _, requests, kv in case["queries"]]
    else:
        found = [model._predict_2d(tokens, kv) for tokens, _, kv in case["queries"]]
    return {"ready": True, "seconds": [float(one) for one in found]}


def engine(case):
    """Return capacity and latencies of the performance model."""
    from dynamo.planner.core.types import EngineCapabilities

    from dynamo.planner.config.planner_config import PlannerConfig
    from dynamo.planner.core.perf_model import PlannerEnginePerfModel

    install_linear(case["coefficients"])
    model = PlannerEnginePerfModel(
        worker_type=case["role"],
        config=PlannerConfig(optimization_target="sla", max_num_fpm_samples=case["window"]),
        capabilities=EngineCapabilities(**case["capabilities"]),
    )
    for rows in case["observed"]:
        model.add_observations(steps(rows))
    query = case["query"]
    capacity = model.find_engine_capacity_rps(**query)
    now = [step(case["now"])]
    scale = case["scale"]
    return {
        "capacity": capacity and [capacity.rps, capacity.ttft_ms, capacity.itl_ms, capacity.eligible],
        "ttft": model.estimate_queued_prefill_time(now, max_num_batched_tokens=1, kv_hit_rate=query["kv_hit_rate"]),
        "ttft_scaled": model.estimate_queued_prefill_time(
            now, max_num_batched_tokens=1, queue_scale=scale, decode_scale=scale, include_queued_decode=True
        ),
        "itl": model.estimate_scheduled_decode_itl(now),
        "itl_scaled": model.estimate_scheduled_decode_itl(now, decode_scale=scale, include_queued_prefill_as_kv=True),
    }


def budget(case):
    """Return every clamp of one pair."""
    from dynamo.planner.core import budget as module

    now_p, now_d, to_p, to_d = case["current"] + case["proposed"]
    gpus_p, gpus_d = case["gpus"]
    low, high = case["band"]
    min_p, min_d = case["minimum"]
    try:
        *power, reason = module.apply_power_budget(
            *case["to"], now_p, now_d, gpus_p * 100, gpus_d * 100, case["watts"], min_p, min_d
        )
        power = [*power, reason is not None]
    except RuntimeError:
        power = "infeasible"
    return {
        "clamp": module.proportional_clamp_pair(to_p, to_d, gpus_p, gpus_d, low, high, min_p, min_d),
        "single": module.proportional_clamp_single(to_p, gpus_p, low, high, min_p),
        "fit": module.fit_directional_budget_pair(now_p, now_d, to_p, to_d, gpus_p, gpus_d, low, high, min_p, min_d),
        "guard": module.guard_disagg_scaling_budget(now_p, now_d, to_p, to_d, gpus_p, gpus_d, low, high, min_p, min_d),
        "guard_single": module.guard_single_scaling_budget(now_p, to_p, gpus_p, low, high, min_p),
        "power": power,
    }


def scaling(case):
    """Return the throughput and load proposals of a sequence of ticks."""
    from dynamo.planner.core.state_machine import PlannerScalingState
    from dynamo.planner.core.types import (
        EngineCapabilities,
        FpmObservations,
        TrafficObservation,
        WorkerCapabilities,
        WorkerCounts,
    )

    from dynamo.planner.config.planner_config import PlannerConfig

    install_linear(case["coefficients"])
    capabilities = {role: EngineCapabilities(**values) for role, values in case["capabilities"].items()}
    state = PlannerScalingState(PlannerConfig(**case["config"]), WorkerCapabilities(**capabilities))
    found = []
    for tick in case["ticks"]:
        state.begin_tick()
        state.observe_worker_counts(WorkerCounts(**tick["counts"]))
        observed = FpmObservations(prefill=steps(tick["prefill"]), decode=steps(tick["decode"]))
        state.observe_fpm(observed)
        throughput = None
        traffic = tick["traffic"]
        if traffic:
            throughput = state.advance_throughput_from_prediction(
                TrafficObservation(duration_s=traffic["duration_s"], num_req=1, isl=1, osl=1),
                predicted_num_req=traffic["num_req"],
                predicted_isl=traffic["isl"],
                predicted_osl=traffic["osl"],
                predicted_kv_hit_rate=traffic["kv_hit_rate"],
                predicted_accept_length=traffic["accept_length"],
            )
        load = None
        if case["runs_load"]:
            load = state.advance_load(
                observed,
                predicted_kv_hit_rate=traffic and traffic["kv_hit_rate"],
                predicted_accept_length=traffic and traffic["accept_length"],
            )
        seen = state.diagnostics()
        found.append(
            {
                "throughput": throughput and [throughput.num_prefill, throughput.num_decode],
                "load": load and [load.num_prefill, load.num_decode],
                "throughput_reason": seen.throughput_decision_reason,
                "throughput_roles": [seen.throughput_decision_reason_prefill, seen.throughput_decision_reason_decode],
                "load_reason": seen.load_decision_reason,
                "load_roles": [seen.load_decision_reason_prefill, seen.load_decision_reason_decode],
                "estimates": [seen.estimated_ttft_ms, seen.estimated_itl_ms],
                "rates": [seen.engine_rps_prefill, seen.engine_rps_decode],
                "bounds": [seen.throughput_lower_bound_prefill, seen.throughput_lower_bound_decode],
            }
        )
    return found


def merge(case):
    """Return the merged targets of a stage."""
    from dynamo.planner.plugins.merge import ComponentKey, PluginResult, type_aware_merge

    from dynamo.planner.plugins.types import AcceptResult, ComponentTarget, OverrideResult, RejectResult

    results = []
    for plugin_id, priority, kind, targets, final in case["results"]:
        made = {
            "accept": AcceptResult,
            "reject": lambda: RejectResult(reason="no"),
            "override": lambda targets=targets: OverrideResult(
                targets=[ComponentTarget(sub_component_type=role, replicas=n, type=t) for role, n, t in targets]
            ),
        }[kind]()
        results.append(PluginResult(plugin_id=plugin_id, priority=priority, result=made, final=final))
    baseline = {ComponentKey(role): count for role, count in case["baseline"].items()}
    found = type_aware_merge(results, baseline, case["set_allowed"])
    targets = found.proposal and {one.sub_component_type: one.replicas for one in found.proposal.targets}
    return {
        "targets": targets,
        "rejected": found.short_circuited,
        "final": found.used_final_from,
        "dropped": sorted({one.sub_component_type for one in found.set_dropped}),
        "clamped": sorted([one[0].sub_component_type, *map(str, one[1:])] for one in found.clamped),
    }


class ScriptedPlugin:
    """A plugin that gives the responses of a case, one per call; None is an error."""

    def __init__(self, responses):
        self.responses = iter(responses)

    async def respond(self, kind, fields):
        from dynamo.planner.plugins import types

        values = dict(fields)
        made = {
            "accept": lambda one: types.AcceptResult(),
            "reject": lambda one: types.RejectResult(reason=one),
            "override": lambda one: types.OverrideResult(
                targets=[types.ComponentTarget(sub_component_type=role, replicas=n, type=t) for role, n, t in one]
            ),
            "predictions": lambda one: types.PredictionData(**one),
            "final": bool,
        }
        return kind(**{name: made[name](value) for name, value in values.items()})

    async def call(self, stage):
        from dynamo.planner.plugins import types

        fields = next(self.responses)
        if fields is None:
            raise RuntimeError("scripted")
        return await self.respond(getattr(types, f"{stage}StageResponse"), fields)

    async def Predict(self, request):
        return await self.call("Predict")

    async def Propose(self, request):
        return await self.call("Propose")

    async def Reconcile(self, request):
        return await self.call("Reconcile")

    async def Constrain(self, request):
        return await self.call("Constrain")


def pipeline(case):
    """Return the outcome of each tick of a pipeline of scripted plugins, which were registered long before."""
    return asyncio.run(pipeline_ticks(case))


def pipeline_metrics(case):
    """Return the samples of the plugin metrics after the ticks of `pipeline`."""
    from dynamo.planner.monitoring.planner_metrics import PluginFrameworkMetrics
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    asyncio.run(pipeline_ticks(case, PluginFrameworkMetrics(registry)))
    return [
        [sample.name, sorted(sample.labels.items()), sample.value]
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


async def pipeline_ticks(case, metrics=None):
    from dynamo.planner.plugins.clock import VirtualClock
    from dynamo.planner.plugins.merge import ComponentKey
    from dynamo.planner.plugins.orchestrator.orchestrator import LocalPlannerOrchestrator
    from dynamo.planner.plugins.registry.auth.base import AllowUnauthenticatedAuth
    from dynamo.planner.plugins.registry.circuit_breaker import CircuitBreaker
    from dynamo.planner.plugins.registry.server import PluginRegistryServer
    from dynamo.planner.plugins.scheduler import PluginScheduler
    from dynamo.planner.plugins.transport.in_process import InProcessTransport

    from dynamo.planner.plugins.types import HoldPolicy, PipelineContext

    clock = VirtualClock()
    breaker = CircuitBreaker(clock)

    def connect(plugin_id, endpoint, in_process_instance=None):
        return InProcessTransport(plugin_id, in_process_instance)

    registry = PluginRegistryServer(
        clock=clock, auth=AllowUnauthenticatedAuth(), circuit_breaker=breaker, transport_factory=connect
    )
    scheduler = PluginScheduler(registry, breaker, clock, metrics=metrics)
    orchestrator = LocalPlannerOrchestrator(
        registry=registry, scheduler=scheduler, circuit_breaker=breaker, clock=clock, metrics=metrics
    )
    for one in case["plugins"]:
        orchestrator.register_internal(
            one["id"],
            one["stage"],
            one["priority"],
            ScriptedPlugin(one["responses"]),
            execution_interval_seconds=one["interval"],
            hold_policy=HoldPolicy(one["hold"]),
            is_builtin=False,
        ).registered_at = -1000.0
    found = []
    for number in range(case["ticks"]):
        context = PipelineContext(request_id=f"tick-{number}")
        baseline = {ComponentKey(role): count for role, count in case["baseline"].items()}
        outcome = await orchestrator.tick(context, baseline, tick_now=clock.monotonic())
        predicted = outcome.predict_outcome and outcome.predict_outcome.prediction
        proposal = outcome.final_proposal if outcome.execute_action == "apply" else None
        found.append(
            {
                "action": outcome.execute_action,
                "targets": proposal and {one.sub_component_type: one.replicas for one in proposal.targets},
                "predicted": predicted and [predicted.predicted_num_req, predicted.predicted_isl, predicted.source],
            }
        )
        clock.advance(5.0)
    return found


def arbitration(case):
    """Return the released global planner's decision of each request of a sequence."""
    import asyncio

    from dynamo.global_planner.capacity_manager import CapacityManager, PoolSpec
    from dynamo.global_planner.orchestrator import Orchestrator

    from dynamo.planner import SubComponentType, TargetReplica

    class Recorder(CapacityManager):
        """Deployments of the case; records the order of changes."""

        def __init__(self):
            self.state = {
                name: {role: [*pool] for role, pool in roles.items()} for name, roles in case["pools"].items()
            }
            self.order, self.is_applied = [], False

        def participant_exists(self, participant_id):
            return True

        def observe(self, require_complete=False):
            return {
                name: {role: PoolSpec(role, *pool) for role, pool in roles.items()}
                for name, roles in self.state.items()
            }

        async def scale(self, participant_id, targets, blocking):
            many = [[one.sub_component_type.value, one.desired_replicas] for one in targets]
            self.order.append([participant_id, many])
            for role, number in many:
                if self.is_applied and role in self.state[participant_id]:
                    self.state[participant_id][role][0] = number

        def current_replicas(self, participant_id):
            return {}

    low, high = case["band"]
    manager, now = Recorder(), [0.0]
    made = Orchestrator(manager, None, high, low, case["ttl"], now=lambda: now[0], use_lock=False)

    async def run():
        found = []
        for at, name, given, is_applied in case["requests"]:
            now[0], manager.order, manager.is_applied = at, [], is_applied
            targets = [
                TargetReplica(sub_component_type=SubComponentType(role), desired_replicas=n) for role, n in given
            ]
            seen, decide = [], made.mediate

            def mediate(*args, seen=seen, decide=decide, **named):
                seen.append(decide(*args, **named))
                return seen[-1]

            made.mediate = mediate
            try:
                await made.submit(name, targets, False, name, name)
            finally:
                made.mediate = decide
            partners = [[one.participant_id, one.sub_type, one.applied_desired] for one in seen[0].selected_partners]
            found.append({"partners": partners, "rejection": seen[0].reject_message, "order": manager.order})
        return found

    return asyncio.run(run())


def functions():
    """Return the functions by name."""
    import peer_planner_surface

    own = (config, predictor, regression, engine, budget, scaling, merge, pipeline, pipeline_metrics, arbitration)
    return {function.__name__: function for function in (*own, *peer_planner_surface.FUNCTIONS)}


def main():
    known = functions()
    for line in sys.stdin:
        request = json.loads(line)
        function = known[request["function"]]
        print(json.dumps([function(case) for case in request["cases"]]), file=results, flush=True)


if __name__ == "__main__":
    results, sys.stdout = sys.stdout, sys.stderr
    main()
