"""Loading of an engine: the model with its cache, the tiers below it, and the transfer of blocks between workers."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.backend.disagg import DisaggregationMode
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.errors import ConfigError
from dynamo.cpu.adapters import Adapters
from dynamo.cpu.architecture import Architecture, cache_size
from dynamo.cpu.attention import cache_bytes
from dynamo.cpu.blocks import KvBlockPool
from dynamo.cpu.config import DEMO_MODEL, CpuConfig
from dynamo.cpu.convert import CpuLimits, Defaults
from dynamo.cpu.core import Core
from dynamo.cpu.kv_exporter import KvExporter
from dynamo.cpu.kv_fetcher import KvFetcher, open_puller
from dynamo.cpu.layout import layout_of
from dynamo.cpu.model import TransformerModel, load_weights
from dynamo.cpu.orders import Fetched, FirstTokenReceived, Order, ReleaseExport, TiersChanged
from dynamo.cpu.scheduler import Scheduler
from dynamo.cpu.tiers import CacheTiers, open_tiers
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.transfer.base import Layout, Region, Transport
from dynamo.kvbm.transfer.puller import Pulled
from dynamo.kvbm.transfer.source import SourceOptions
from dynamo.protocols.engine import RESUMES_SAMPLING
from dynamo.protocols.native import VLLM_CAPABILITY
from dynamo.routing.prefill_plan import LOCAL_PREFILL
from dynamo.runtime.config import tcp_options

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenParts:
    """Parts of an engine that must be closed, each from the moment it is open: loading may fail or be abandoned."""

    tiers: CacheTiers | None = None
    exporter: KvExporter | None = None
    """Block exporter of a prefill worker."""
    fetcher: KvFetcher | None = None
    """Block fetcher of a decode worker."""

    def close(self) -> None:
        """Close the parts; blocks until their threads have ended."""
        for part in (self.tiers, self.exporter, self.fetcher):
            if part is not None:
                part.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """Parts of an engine whose thread is not started yet."""

    config: EngineConfig
    """What the worker publishes of the engine."""
    core: Core
    limits: CpuLimits
    adapters: Adapters
    defaults: Defaults
    layout: Layout | None
    """Layout of a block; None for a worker that exchanges no blocks with others."""


def load_engine(
    config: CpuConfig,
    parts: OpenParts,
    host: EngineHost,
    put: Callable[[Order], None],
    on_fetched: Callable[[str, Pulled | None], None],
) -> LoadedEngine:
    """Load the model and open `parts`; blocks for seconds. Raise `ConfigError`.

    `put` receives the orders of threads for the engine's thread; `on_fetched` receives the result of each fetch, on a
    thread of the fetch pool.
    """
    path = config.directory
    if path == DEMO_MODEL:
        logger.warning("this is the bundled demo model, trained only on this project and small sums")
    shape = Architecture.read(path)
    if shape.labels:
        raise ConfigError(f"{path}: the model is a classifier; add --classify-worker")
    context_length, blocks = cache_size(config, shape)
    if config.role is DisaggregationMode.PREFILL:
        size = cache_bytes(shape.layers, shape.kv_heads, blocks * config.block_size, shape.head_dim)
        parts.exporter = KvExporter(_transports(config), size)
    model = TransformerModel(
        shape,
        load_weights(path, shape),
        slots=blocks * config.block_size,
        rows_max=config.max_num_batched_tokens,
        longest=context_length,
        memory=None if parts.exporter is None else parts.exporter.memory,
    )
    parts.tiers = _tiers(config, model, host, put)
    layout = _open_transfers(config, parts, model, put, on_fetched)
    return LoadedEngine(
        config=_engine_config(config, parts, context_length, blocks),
        core=_core(config, parts, model, blocks),
        limits=CpuLimits(
            vocab_size=shape.vocab_size,
            context_length=context_length,
            block_tokens=config.block_size,
            choices_max=config.max_num_seqs,
        ),
        adapters=Adapters(config, shape),
        defaults=Defaults.read(path),
        layout=layout,
    )


def _core(config: CpuConfig, parts: OpenParts, model: TransformerModel, blocks: int) -> Core:
    scheduler = Scheduler(
        KvBlockPool(blocks, is_caching=config.enable_prefix_caching, notes_evicted=parts.tiers is not None),
        sequences_max=config.max_num_seqs,
        batched_tokens_max=config.max_num_batched_tokens,
        tiers=parts.tiers,
        adapters_max=config.max_loras if config.enable_lora else None,
    )
    return Core(model, scheduler, config.block_size, parts.tiers, exporter=parts.exporter, puller=parts.fetcher)


def _engine_config(config: CpuConfig, parts: OpenParts, context_length: int, blocks: int) -> EngineConfig:
    """Return what the worker publishes of the loaded engine."""
    server = None if parts.exporter is None else parts.exporter.server
    return EngineConfig(
        model_path=config.directory,
        served_model_name=config.name,
        device="cpu",
        context_length=context_length,
        kv_cache_block_size=config.block_size,
        total_kv_blocks=blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        bootstrap_host=None if server is None else server.host,
        bootstrap_port=None if server is None else server.port,
        runtime_data={VLLM_CAPABILITY: True, RESUMES_SAMPLING: True}
        | ({LOCAL_PREFILL: True} if parts.fetcher is not None else {}),
    )


def _tiers(
    config: CpuConfig, model: TransformerModel, host: EngineHost, put: Callable[[Order], None]
) -> CacheTiers | None:
    """Open the tiers below the cache; None if they are disabled."""
    kvbm = KvbmConfig.read()
    if not (kvbm.is_enabled and config.enable_prefix_caching):
        return None
    tls, worker_id = tcp_options(options=config).tls, f"{host.worker_id:x}"
    return open_tiers(
        kvbm, config.directory, model.cache, config.block_size, worker_id, lambda: put(TiersChanged()), tls
    )


def _open_transfers(
    config: CpuConfig,
    parts: OpenParts,
    model: TransformerModel,
    put: Callable[[Order], None],
    on_fetched: Callable[[str, Pulled | None], None],
) -> Layout | None:
    """Start the exporter of a prefill worker or the fetcher of a decode worker; return the layout of their blocks."""
    if config.role is DisaggregationMode.AGGREGATED:
        return None
    layout = layout_of(config.directory, model.shape, config.block_size)
    if parts.exporter is not None:
        _open_exporter(parts.exporter, config, model, layout, put)
    elif config.role is DisaggregationMode.DECODE:
        parts.fetcher = _fetcher(config, model, layout, put, on_fetched)
    return layout


def _transports(config: CpuConfig) -> list[Transport]:
    return [Transport(name) for name in config.kv_transfer]


def _open_exporter(
    exporter: KvExporter, config: CpuConfig, model: TransformerModel, layout: Layout, put: Callable[[Order], None]
) -> None:
    """Start the block exporter of a prefill worker."""
    tcp = tcp_options(options=config)
    blocks = model.cache.pages.shape[2] // config.block_size
    options = SourceOptions(
        host=config.kv_transfer_host or tcp.host,
        port=config.kv_transfer_port,
        ttl_s=config.kv_hold_timeout,
        blocks_max=max(1, int(blocks * config.kv_hold_share)),
        tls=tcp.tls,
    )
    exporter.open(layout, model.cache.pages, options, lambda freed: put(ReleaseExport(freed)))
    if config.bootstrap_port is not None:
        exporter.open_server(options.host, config.bootstrap_port, tcp.tls)


def _fetcher(
    config: CpuConfig,
    model: TransformerModel,
    layout: Layout,
    put: Callable[[Order], None],
    on_fetched: Callable[[str, Pulled | None], None],
) -> KvFetcher:
    """Start the block fetcher of a decode worker."""
    tls = tcp_options(options=config).tls
    return KvFetcher(
        open_puller(Region(layout, model.cache.pages), _transports(config), tls),
        config.block_size,
        config.kv_transfer_timeout,
        ended=lambda fetch, is_whole: put(Fetched(fetch, is_whole)),
        on_fetched=on_fetched,
        first=lambda fetch: put(FirstTokenReceived(fetch)),
        tls=tls,
    )
