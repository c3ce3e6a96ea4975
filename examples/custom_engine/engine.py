"""An engine of the unified backend SDK that repeats the prompt: python examples/custom_engine/engine.py --model DIRECTORY.

It shows every part of an engine: streaming, cancellation, load, a control, and prefill and decode workers, between which
the prompt's tokens are handed over in place of a KV cache. The same file runs with the released package.
"""

import argparse
import asyncio
import os

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig, telemetry
from dynamo.common.backend.disagg import enforce_prefill_max_tokens, require_prefill_result
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.publisher import ComponentSnapshot
from dynamo.common.backend.run import run
from dynamo.common.constants import DisaggregationMode

CONTEXT_LENGTH = 2048
BLOCK_TOKENS = 16
BLOCKS = 1000


class RepeatingEngine(LLMEngine):
    """Returns the prompt's tokens in order, `delay` seconds each."""

    def __init__(self, model, name, delay, mode):
        self.model = model
        self.name = name
        self.delay = delay
        self.mode = mode
        self.load = None
        self.running = {}
        self.handed_over = 0

    @classmethod
    async def from_args(cls, argv=None):
        parser = argparse.ArgumentParser(description="Engine that repeats the prompt")
        parser.add_argument("--model", required=True, help="Model whose tokenizer is used: a directory or a hub id")
        parser.add_argument("--name", default="repeat", help="Name of the model for clients")
        parser.add_argument("--delay", type=float, default=0.01, help="Seconds per token")
        parser.add_argument("--disaggregation-mode", default="agg", choices=["agg", "prefill", "decode"])
        args = parser.parse_args(argv)
        mode = DisaggregationMode(args.disaggregation_mode)
        config = WorkerConfig(
            namespace="examples",
            component="prefill" if mode is DisaggregationMode.PREFILL else "backend",
            model_name=args.model,
            served_model_name=args.name,
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
            disaggregation_mode=mode,
        )
        return cls(args.model, args.name, args.delay, mode), config

    async def start(self, worker_id):
        """Here an engine loads its weights."""
        return EngineConfig(
            model=self.model,
            served_model_name=self.name,
            llm=LlmRegistration(
                context_length=CONTEXT_LENGTH, kv_cache_block_size=BLOCK_TOKENS, total_kv_blocks=BLOCKS, max_num_seqs=64
            ),
        )

    def component_metrics_dp_ranks(self):
        return [0]

    def attach_snapshot_publisher(self, publisher):
        self.load = publisher

    async def on_endpoint_ready(self, endpoint):
        print(f"serving {self.name} as {self.mode.value}", flush=True)

    async def health_check_payload(self):
        return build_health_check_payload(bos_token_id=1)

    def supported_controls(self):
        return {"set_delay"}

    async def engine_control(self, control, body):
        self.delay = float(body["seconds"])
        return {"status": "ok"}

    async def generate(self, request, context):
        tokens = request["token_ids"]
        if self.mode is DisaggregationMode.DECODE and not is_probe(request):
            tokens = require_prefill_result(request, self.mode)["disaggregated_params"]["tokens"]
        if self.mode is DisaggregationMode.PREFILL:
            self.handed_over += 1
            enforce_prefill_max_tokens(request)
        limit = (request.get("stop_conditions") or {}).get("max_tokens") or len(tokens)
        self.running[context.id()] = len(tokens)
        self.publish_load()
        try:
            with telemetry.start_span(context, "repeat", tokens=len(tokens)):
                answer = tokens[:limit]
                for token in answer[:-1]:
                    await asyncio.sleep(self.delay)
                    if context.is_stopped():
                        yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                        return
                    yield {"token_ids": [token], "index": 0}
                yield self.last_chunk(request, answer)
        finally:
            del self.running[context.id()]
            self.publish_load()

    def last_chunk(self, request, answer):
        """The last token, the usage, and for the decode worker the tokens of the prompt."""
        count = len(request["token_ids"])
        chunk = {
            "token_ids": answer[-1:],
            "index": 0,
            "finish_reason": "length",
            "completion_usage": {
                "prompt_tokens": count,
                "completion_tokens": len(answer),
                "total_tokens": count + len(answer),
            },
        }
        if self.mode is DisaggregationMode.PREFILL:
            chunk["disaggregated_params"] = {"tokens": request["token_ids"]}
        return chunk

    def publish_load(self):
        """Routers prefer the worker with fewer used blocks."""
        if self.load is not None:
            used = sum(-(-tokens // BLOCK_TOKENS) for tokens in self.running.values())
            self.load.publish(0, ComponentSnapshot(used, BLOCKS, used / BLOCKS, dp_rank=0))

    async def abort(self, context):
        print("aborted a request", flush=True)

    async def is_quiescent(self):
        """Nothing is fetched from this prefill worker: its handover is part of the response."""
        return True

    async def cleanup(self):
        print(f"cleaned up with {len(self.running)} running requests", flush=True)


if __name__ == "__main__":
    run(RepeatingEngine)
