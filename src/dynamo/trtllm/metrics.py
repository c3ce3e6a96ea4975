"""Metrics: conversion of TensorRT-LLM's step statistics into load reports, forward passes and metrics."""

from collections.abc import Mapping
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.protocols.load import ForwardPass, QueuedRequests, ScheduledRequests, WorkerLoad


class TrtllmStepReporter:
    """Receiver of the statistics of consecutive steps."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._published: dict[int, WorkerLoad] = {}
        self._hit_rate = host.metrics.gauge(
            "trtllm_kv_cache_hit_rate", "KV blocks found in the cache, 0-1", ("dp_rank",)
        )
        self._utilization = host.metrics.gauge("trtllm_kv_cache_utilization", "KV blocks in use, 0-1", ("dp_rank",))

    def on_step(self, stat: Mapping[str, Any]) -> None:
        """Publish one step. Raise `KeyError` for malformed statistics."""
        rank = int(stat.get("attentionDpRank") or 0)
        cache = stat["kvCacheStats"]
        load = load_of(stat, rank)
        if self._published.get(rank) != load:
            self._published[rank] = load
            self._host.publish_load(load)
        if load.kv_total_blocks:
            self._utilization.labels(dp_rank=str(rank)).set(load.kv_used_blocks / load.kv_total_blocks)
        if "cacheHitRate" in cache:
            self._hit_rate.labels(dp_rank=str(rank)).set(cache["cacheHitRate"])
        passed = pass_of(stat)
        if passed is not None:
            self._host.publish_forward_pass(passed, rank)


def load_of(stat: Mapping[str, Any], rank: int) -> WorkerLoad:
    """Return the load of a rank after a step."""
    cache = stat["kvCacheStats"]
    batch = stat.get("inflightBatchingStats") or {}
    return WorkerLoad(
        dp_rank=rank,
        active_decode_blocks=cache["usedNumBlocks"],
        kv_used_blocks=cache["usedNumBlocks"],
        kv_total_blocks=cache["maxNumBlocks"],
        running_requests=stat.get("numActiveRequests", 0),
        waiting_requests=stat.get("numQueuedRequests", 0) + batch.get("numPausedRequests", 0),
    )


def pass_of(stat: Mapping[str, Any]) -> ForwardPass | None:
    """Return the work of a step; None if it computed nothing. Sums that TensorRT-LLM does not report are zero."""
    batch = stat.get("inflightBatchingStats") or {}
    prompts, answers = batch.get("numContextRequests", 0), batch.get("numGenRequests", 0)
    if not prompts and not answers:
        return None
    return ForwardPass(
        stat.get("iterLatencyMS", 0.0) / 1000.0,
        ScheduledRequests(
            num_prefill_requests=prompts, sum_prefill_tokens=batch.get("numCtxTokens", 0), num_decode_requests=answers
        ),
        QueuedRequests(
            num_prefill_requests=stat.get("numQueuedRequests", 0), num_decode_requests=batch.get("numPausedRequests", 0)
        ),
    )
