"""Metrics: cache size and load from a server's Prometheus text. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dynamo.protocols.load import WorkerLoad

PREFIXES = ("vllm:", "sglang:", "llamacpp:")
"""Name prefixes of the series that are read."""
RANK_LABELS = ("engine", "dp_rank")
"""Labels that contain the data-parallel rank, depending on the server."""
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")
CACHE = "vllm:cache_config_info"
RANKS_MAX = 1024  # A larger number indicates a malformed page.

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the Prometheus text."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def rank(self) -> int:
        """Return the sample's rank; 0 if it has no rank label."""
        text = next((self.labels[label] for label in RANK_LABELS if label in self.labels), "")
        return int(text) if text.isdigit() else 0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of a server's cache."""

    block_tokens: int
    blocks: int
    """Blocks of each rank."""
    ranks: int


def samples_of(text: str) -> Iterator[Sample]:
    """Yield the relevant samples; skip malformed lines."""
    for line in text.splitlines():
        if not line.startswith(PREFIXES):
            continue
        name, opened, rest = line.partition("{")
        labels, _, value = rest.rpartition("}") if opened else ("", "", "")
        if not opened:
            name, _, value = line.partition(" ")
        try:
            number = float(value.split()[0])
        except (ValueError, IndexError):
            continue
        yield Sample(name, dict(_LABEL.findall(labels)), number)


def cache_shape(samples: Iterable[Sample]) -> CacheShape | None:
    """Return the cache size that vLLM reports; None if there is none."""
    cache_samples = [one for one in samples if one.name == CACHE]
    for one in cache_samples:
        block, blocks = one.labels.get("block_size", ""), one.labels.get("num_gpu_blocks", "")
        if block.isdigit() and blocks.isdigit() and int(block) > 0:
            return CacheShape(
                int(block), int(blocks), max(1, min(RANKS_MAX, len({same.rank for same in cache_samples})))
            )
    return None


def loads_of(samples: Iterable[Sample], blocks: int) -> list[WorkerLoad]:
    """Return the load of each rank with `blocks` blocks; empty if the page is of another kind of server."""
    found: dict[int, WorkerLoad] = {}
    for one in samples:
        if one.name not in (*RUNNING, *WAITING, *USAGE) or one.labels.get("tp_rank", "0") != "0":
            continue
        load = found.setdefault(one.rank, WorkerLoad(dp_rank=one.rank, kv_total_blocks=blocks))
        if one.name in RUNNING:
            load.running_requests = max(0, int(one.value))
        elif one.name in WAITING:
            load.waiting_requests = max(0, int(one.value))
        elif 0 <= one.value <= 1:
            load.kv_used_blocks = load.active_decode_blocks = round(one.value * blocks)
    return [found[rank] for rank in sorted(found)[:RANKS_MAX]]
