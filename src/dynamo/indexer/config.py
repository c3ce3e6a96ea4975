"""IndexerOptions: the flags of `python -m dynamo.indexer`."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_events.engine_subscriber import check_endpoint
from dynamo.kv_router.index import BLOCKS_MAX


@dataclass(frozen=True, slots=True)
class InitialWorker:
    """A worker that is named on the command line."""

    instance_id: int
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerOptions:
    """Standalone KV indexer: follows engines' KV events and returns the workers' cached prefixes."""

    block_size: int | None = option(None, "--block-size", None, "Tokens of a KV block of the workers in --workers")
    port: int = option(8090, "--port", None, "HTTP port")
    threads: int = option(
        4, "--threads", None, "Accepted for compatibility; has no effect: one event loop applies the events"
    )
    workers: str = option("", "--workers", None, 'Workers to follow from the start: "id[:rank]=tcp://host:port,…"')
    model_name: str = option("default", "--model-name", None, "Model of the workers in --workers")
    routing_group: str = option("default", "--routing-group", None, "Routing group of the workers in --workers")
    peers: list[str] = option([], "--peers", None, "URLs of other indexers whose index is copied at the start")
    access_log: str | None = option(None, "--access-log", None, "Access log file: one JSON line per request")
    trace_id_header: str = option("x-trace-id", "--trace-id-header", None, "Request header to log as the trace id")
    access_log_local_time: bool = option(
        False, "--access-log-local-time", None, "Use local time in the access log instead of UTC"
    )
    index_blocks_max: int = option(
        BLOCKS_MAX,
        "--router-index-max-blocks",
        "DYN_ROUTER_INDEX_MAX_BLOCKS",
        "Maximum blocks of each model's index; the least recently used ones are dropped",
    )

    def __post_init__(self) -> None:
        if self.workers and not self.block_size:
            raise ConfigError("--workers: requires --block-size of at least 1")
        if self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: must be at least 1")
        if self.index_blocks_max < 1:
            raise ConfigError(f"--router-index-max-blocks {self.index_blocks_max}: must be at least 1")
        self.initial_workers()

    def initial_workers(self) -> list[InitialWorker]:
        """Return the workers of `--workers`. Raises `ConfigError`."""
        found = []
        for part in filter(None, (one.strip() for one in self.workers.split(","))):
            name, is_named, endpoint = part.partition("=")
            instance, _, rank = name.partition(":")
            if not is_named or not instance.isdecimal() or not (rank or "0").isdecimal():
                raise ConfigError(f"--workers {part}: expected id=address or id:rank=address")
            try:
                check_endpoint(endpoint)
            except InvalidArgument as error:
                raise ConfigError(f"--workers {part}: {error}") from None
            found.append(InitialWorker(int(instance), int(rank or 0), endpoint))
        return found
