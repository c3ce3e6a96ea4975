"""Facts about a machine, as the collectors see them and the checks read them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A required distribution, and what is installed of it."""

    name: str
    specifier: str
    """Accepted versions, such as `>=1.0,<2`; empty for any."""
    installed: str | None
    is_accepted: bool = True
    """Whether the installed version is one of the accepted ones."""

    @property
    def requirement(self) -> str:
        """Return the requirement as pip reads it."""
        return f"{self.name}{self.specifier}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """The interpreter and the distributions of this package."""

    python: tuple[int, int, int]
    implementation: str
    executable: str
    is_installed: bool
    """Whether the distribution's metadata exist; a source tree on PYTHONPATH has none."""
    version: str
    """Version of the imported package."""
    metadata_version: str | None
    """Version of the installed distribution."""
    required: tuple[Distribution, ...] = ()
    extras: Mapping[str, tuple[Distribution, ...]] = field(default_factory=dict)
    """Distributions of each optional extra that users install."""
    install: Mapping[str, str] = field(default_factory=dict)
    """Command that installs an extra; that of the empty name installs the required distributions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi reports it."""

    index: str
    name: str
    uuid: str
    driver: str
    memory_mib: int
    used_mib: int
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded; None if not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The GPUs of this machine."""

    gpus: tuple[Gpu, ...] = ()
    error: str = ""
    """Why nvidia-smi reported none; empty if the program is not installed."""
    devices: int = 0
    """Number of device files /dev/nvidia0, /dev/nvidia1, …"""
    visible: str | None = None
    """Value of CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Space of one file system."""

    use: str
    """What the directory is used for."""
    path: str
    total_bytes: int = 0
    free_bytes: int = 0
    free_inodes: int | None = None
    is_writable: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Resources of this machine, or of the container."""

    cores: int
    memory_bytes: int
    """Memory, or the container's limit if that is less."""
    available_bytes: int
    open_files: int
    """Soft limit of open files of this process."""
    open_files_max: int
    """Hard limit."""
    shm: Space | None = None
    """Shared memory, /dev/shm."""
    spaces: tuple[Space, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """A TCP port that a process of a graph will use."""

    setting: str
    """Variable or flag that chooses it."""
    host: str
    port: int
    error: str = ""
    """Why this process cannot listen on it; empty if it can."""
    is_in_use: bool = False
    owner: str = ""
    """Process that listens there, if it can be determined."""
    is_needed: bool = True
    """Whether a process uses this port with the present settings."""
    is_dynamo: bool = False
    """Whether a Dynamo frontend answers on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendFacts:
    """A frontend that answers on the HTTP port."""

    url: str
    status: str = ""
    """Value of `status` of /health."""
    version: str = ""
    """Version in the OpenAPI document."""
    models: tuple[str, ...] = ()
    needs_key: bool = False
    instances: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """The directory of the file discovery."""

    path: str
    exists: bool
    is_named: bool = False
    """Whether DYN_FILE_KV names it."""
    problem: str = ""
    """Why a process refuses the directory, in its own words."""
    is_writable: bool = True
    live: int = 0
    stale: tuple[str, ...] = ()
    """Records that no process refreshes."""
    foreign: tuple[str, ...] = ()
    """Records that other users own."""
    unreadable: tuple[str, ...] = ()
    """Files whose names are no encoded keys, and records that are no JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """A server that processes connect to."""

    name: str
    setting: str
    address: str
    error: str = ""
    elapsed_ms: float = 0.0
    is_required: bool = True
    """Whether the present settings use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServerFacts:
    """Access to a Kubernetes cluster."""

    source: str
    """What names the cluster: KUBECONFIG, ~/.kube/config or the service account."""
    is_required: bool
    """Whether processes use the cluster for discovery."""
    address: str = ""
    namespace: str = ""
    error: str = ""
    has_graphs: bool = False
    """Whether DynamoGraphDeployment is installed."""
    has_metadata: bool = False
    """Whether DynamoWorkerMetadata, which discovery needs, is installed."""
    pods: int | None = None
    """Number of pods in the namespace; None if they cannot be listed."""
    pods_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """The difference between another clock and this one."""

    source: str
    skew_s: float
    """Seconds by which the other clock is ahead."""
    error_s: float
    """Maximum error of the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """One process of a running graph."""

    name: str
    pid: int
    version: str
    """Version of the installed package; empty if it cannot be determined."""
    product: str = "dynamo-serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """A model that is to be served."""

    given: str
    """The path or name as given."""
    path: str = ""
    """Its directory; empty if there is none."""
    is_name: bool = False
    """Whether it is a name on the Hugging Face hub."""
    is_file: bool = False
    nearest: str = ""
    """Directory of a similar name, where the given one does not exist."""
    config_error: str = ""
    architecture: str = ""
    has_tokenizer: bool = False
    missing: tuple[str, ...] = ()
    """Weights that the index names and that do not exist."""
    placeholders: tuple[str, ...] = ()
    """Weights that are Git LFS pointers or empty."""
    weights_bytes: int = 0
    is_offline: bool = False
    """Whether HF_HUB_OFFLINE forbids downloads."""
    has_token: bool = False
    """Whether a token of the hub is configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Everything that the checks read."""

    variables: Mapping[str, str]
    backend: str
    """Discovery backend with the present settings; empty if they are wrong."""
    settings_error: str = ""
    """Error of the first wrong variable."""
    packages: PackageFacts
    gpus: GpuFacts
    host: HostFacts
    ports: tuple[PortFacts, ...] = ()
    frontend: FrontendFacts | None = None
    directory: DirectoryFacts | None = None
    services: tuple[ServiceFacts, ...] = ()
    cluster: ApiServerFacts | None = None
    clocks: tuple[ClockFacts, ...] = ()
    parts: tuple[PartFacts, ...] = ()
    checkpoint: CheckpointFacts | None = None
