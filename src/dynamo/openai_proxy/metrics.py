"""Metrics: what a server's Prometheus text says of its cache and its load. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dynamo.protocols.load import WorkerLoad

PREFIXES = ("vllm:", "sglang:", "llamacpp:")
"""Of the series that are looked at."""
RANK_LABELS = ("engine", "dp_rank")
"""Under which of these a series names its data-parallel rank depends on the server."""
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")
CACHE = "vllm:cache_config_info"
RANKS_MAX = 1024  # More is no deployment but a broken page.

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def rank(self) -> int:
        """The rank that it is of; 0 where it names none."""
        text = next((self.labels[label] for label in RANK_LABELS if label in self.labels), "")
        return int(text) if text.isdigit() else 0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How large a server's cache is."""

    block_tokens: int
    blocks: int
    """Of each rank."""
    ranks: int


def samples_of(text: str) -> Iterator[Sample]:
    """The lines that are of interest; one that cannot be read is left out."""
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
    """What vLLM says of its cache; None where it says nothing."""
    told = [one for one in samples if one.name == CACHE]
    for one in told:
        block, blocks = one.labels.get("block_size", ""), one.labels.get("num_gpu_blocks", "")
        if block.isdigit() and blocks.isdigit() and int(block) > 0:
            return CacheShape(int(block), int(blocks), max(1, min(RANKS_MAX, len({same.rank for same in told}))))
    return None


def loads_of(samples: Iterable[Sample], blocks: int) -> list[WorkerLoad]:
    """The load of each rank, which has so many blocks; none where the page is of another kind of server."""
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
