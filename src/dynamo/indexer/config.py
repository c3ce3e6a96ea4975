"""IndexerOptions: the flags of `python -m dynamo.indexer` (serving-plane.md §4.12)."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_events.engine_subscriber import check_endpoint
from dynamo.kv_router.index import BLOCKS_MAX


@dataclass(frozen=True, slots=True)
class InitialWorker:
    """A worker that the command line names."""

    instance_id: int
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerOptions:
    """Standalone KV indexer: follows engines' KV events and says who holds which prefix."""

    block_size: int | None = option(None, "--block-size", None, "Tokens of a KV block of the workers in --workers")
    port: int = option(8090, "--port", None, "HTTP port")
    threads: int = option(
        4, "--threads", None, "Without effect: one loop applies events faster than several threads did"
    )
    workers: str = option("", "--workers", None, 'Workers to follow from the start: "id[:rank]=tcp://host:port,…"')
    model_name: str = option("default", "--model-name", None, "The model of these workers")
    routing_group: str = option("default", "--routing-group", None, "The routing group of these workers")
    peers: list[str] = option([], "--peers", None, "URLs of other indexers, asked at the start for what they know")
    access_log: str | None = option(None, "--access-log", None, "File that every request is noted in, as JSON lines")
    trace_id_header: str = option("x-trace-id", "--trace-id-header", None, "The header that names a request in it")
    access_log_local_time: bool = option(
        False, "--access-log-local-time", None, "Note local time there, in place of UTC"
    )
    index_blocks_max: int = option(
        BLOCKS_MAX,
        "--router-index-max-blocks",
        "DYN_ROUTER_INDEX_MAX_BLOCKS",
        "Bound of each model's index; beyond it what was used longest ago is forgotten",
    )

    def __post_init__(self) -> None:
        if self.workers and not self.block_size:
            raise ConfigError("--workers needs --block-size, at least 1")
        if self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: expected at least 1")
        if self.index_blocks_max < 1:
            raise ConfigError(f"--router-index-max-blocks {self.index_blocks_max}: expected at least 1")
        self.initial_workers()

    def initial_workers(self) -> list[InitialWorker]:
        """What `--workers` names. Raises `ConfigError`."""
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
