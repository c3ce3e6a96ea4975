"""Both ends of the endpoint `get_perf_metrics`; run by the Python of either implementation.

`peer_perf_metrics.py serve NAMESPACE.COMPONENT FILE` serves the contents of a JSON file. `peer_perf_metrics.py fetch NAMESPACE COMPONENT
ROLE` prints what the released planner reads, with the Python of `benchmarks.planner_peer`.
"""

import asyncio
import json
import sys
from pathlib import Path

from dynamo.runtime import DistributedRuntime


async def serve(runtime, component, path):
    result = json.loads(Path(path).read_text(encoding="utf-8"))  # noqa: ASYNC240 - before anything is served

    async def get_perf_metrics(request=None):
        yield result

    await runtime.endpoint(f"{component}.get_perf_metrics").serve_endpoint(get_perf_metrics)


async def fetch(runtime, namespace, component, role):
    import peer_planner

    assert peer_planner.Stubs
    from dynamo.planner.monitoring.perf_metrics import fetch_pre_deployment_metrics
    from dynamo.planner.monitoring.worker_info import WorkerInfo

    from dynamo.planner.config.defaults import SubComponentType

    found = await fetch_pre_deployment_metrics(
        runtime, namespace, WorkerInfo(component_name=component), None, SubComponentType(role)
    )
    rows = [
        [
            one.wall_time,
            one.scheduled_requests.num_prefill_requests,
            one.scheduled_requests.sum_prefill_tokens,
            one.scheduled_requests.num_decode_requests,
            one.scheduled_requests.sum_decode_kv_tokens,
        ]
        for one in found
    ]
    print("steps", json.dumps(rows), flush=True)


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    work, *arguments = sys.argv[1:]
    await {"serve": serve, "fetch": fetch}[work](runtime, *arguments)
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
