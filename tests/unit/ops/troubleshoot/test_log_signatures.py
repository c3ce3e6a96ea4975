"""Each signature of lines finds its failure in lines as engines and processes write them, and nothing in healthy logs."""

import pytest

from dynamo.ops.troubleshoot.case import CaseFacts
from dynamo.ops.troubleshoot.log_signatures import LOG_SIGNATURES
from dynamo.ops.troubleshoot.signature import matches

LINES = {
    "gpu-memory": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "ValueError: Free memory on device (2.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9)",
    ],
    "kv-cache-too-small": [
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (40960).",
        "ValueError: To serve at least one request with the models's max seq len (40960), (4.38 GiB KV cache is needed, which is larger",
    ],
    "host-memory": [
        "worker-1 was killed by SIGKILL",
        "Out of memory: Killed process 4242 (python3) total-vm:98304kB",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate; OSError: [Errno 12] Cannot allocate memory",
    ],
    "shared-memory": [
        "Bus error (core dumped)",
        "RuntimeError: DataLoader worker is killed by signal: Bus error. insufficient shared memory (shm)",
        "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'",
    ],
    "disk-full": [
        "error: DYN_FILE_KV='/data': cannot write a record: No space left on device",
        "OSError: [Errno 122] Disk quota exceeded",
        "etcdserver: mvcc: database space exceeded",
    ],
    "open-files": ["failed to accept connections: [Errno 24] Too many open files"],
    "port-clash": [
        "error: --http-port 8000: the port is in use by another process (address 0.0.0.0); choose another one",
        "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
    ],
    "gpu-absent": [
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "RuntimeError: Failed to infer device type",
    ],
    "gpu-driver": [
        "RuntimeError: The NVIDIA driver on your system is too old: CUDA driver version is insufficient for CUDA runtime version",
        "CUDA error: no kernel image is available for execution on the device",
        "Failed to initialize NVML: Driver/library version mismatch",
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9",
    ],
    "gpu-fault": [
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ],
    "nccl": [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, ncclSystemError",
        "node0:41:88 [1] NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes",
    ],
    "slow-transport": [
        "host:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
        "UCX  WARN  transport 'rc_mlx5' is not available, please use one or more of: tcp, self",
    ],
    "multinode-leader": [
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "The client socket has timed out after 600000ms while trying to connect to (leader-0, 29500).",
    ],
    "nixl-backend": [
        "nixl_cu12._bindings.nixlNotFoundError: NIXL_ERR_NOT_FOUND",
        "RuntimeError: NIXL is not available",
    ],
    "model-auth": [
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1)",
        "OSError: You are trying to access a gated repo.",
        "error: model meta-llama/L: the repository is gated: accept its terms on the hub and log in (`hf auth login`)",
    ],
    "model-path": [
        "error: model /models/llama: no such directory",
        "error: model x y: no such directory, and not a valid name on the Hugging Face hub",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/x'",
    ],
    "model-incomplete": [
        "error: model directory /m: config.json is missing",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "error: /m: the checkpoint has no tensor lm_head.weight",
    ],
    "model-network": [
        "error: model a/b: no such directory, not in the local cache, and the Hugging Face hub is unreachable",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x",
    ],
    "model-architecture": [
        "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",
        "ValueError: The checkpoint has model type `foo` but Transformers does not recognize this architecture.",
    ],
    "remote-code": [
        "ValueError: The repository requires custom code. Please pass the argument `trust_remote_code=True`"
    ],
    "context-length": [
        "ValueError: User-specified max_model_len (131072) is greater than the derived max_model_len (max_position_embeddings=32768)"
    ],
    "parallel-size": [
        "ValueError: Total number of attention heads (14) must be divisible by tensor parallel size (4).",
        "ValueError: World size (8) is larger than the number of available GPUs (4) in this node.",
    ],
    "parser": ["error: --dyn-tool-call-parser hermess: must be one of hermes, llama3_json"],
    "etcd-down": [
        "WARNING waiting for etcd (ETCD_ENDPOINTS), at most 120 s: no connection: Connection refused",
        "error: ETCD_ENDPOINTS=http://e:2379: no response from etcd within 120 s (no connection)",
        "Unable to create lease. Check etcd server status at http://e:2379",
    ],
    "lease-lost": [
        "WARNING 2 record(s) of v1/instances were not registered again after the outage",
        "ERROR etcdserver: requested lease not found",
    ],
    "nats-down": [
        "error: no NATS server at nats://n:4222 (NATS_SERVER) within 120 s: Connection refused",
        "WARNING events: connection to NATS at nats://n:4222 lost: EOF; reconnecting",
    ],
    "server-credentials": [
        "error: NATS at nats://n:4222: authorization rejected (NATS_AUTH_*): nats: 'Authorization Violation'",
        "error: ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD: rejected by http://e:2379: authentication failed",
    ],
    "certificate": [
        "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired",
        "error: ETCD_AUTH_CA: certificate of https://e:2379 is not trusted: self-signed certificate",
    ],
    "discovery-directory": [
        "error: DYN_FILE_KV='/tmp/kv': mode 0777 lets other users write; run: chmod go-w /tmp/kv",
        "error: DYN_FILE_KV='/tmp/kv': owned by user 0, expected user 1000 that runs this process; name another directory",
    ],
    "kubernetes-role": [
        "error: DynamoWorkerMetadata ns/w: forbidden; the pod's service account requires the role of Kubernetes discovery",
        'endpointslices is forbidden: User "system:serviceaccount:ns:default" cannot list resource "endpointslices"',
    ],
    "prometheus-down": ["WARNING observation failed: no connection to prometheus.monitoring:9090: Connection refused"],
    "event-plane-mismatch": [
        "WARNING v1/event_channels/a uses a different event plane; set the same --event-plane for all processes"
    ],
    "no-prefill-worker": [
        "WARNING request 1: no prefill worker is left; its decode worker computes the prompt",
    ],
    "wire-version": [
        "WARNING closing connection of 10.0.0.2:4000: malformed request frame: expected 4 fields",
        "ERROR failed to decode: unknown variant `Chunk`, expected one of `Data`, `End`",
    ],
    "unresponsive-worker": [
        "WARNING worker 10.0.0.2:4000 unresponsive; migrating 3 requests",
        "ERROR health check of ns.backend.generate failed: ResponseTimeout",
    ],
    "wrong-flag": [
        "error: unknown argument --modle-path; did you mean --model-path (see python -m dynamo.cpu --help)",
        "vllm serve: error: unrecognized arguments: --foo",
    ],
    "connector-flag": [
        "ValueError: --connector is deprecated and was removed, use --kv-transfer-config",
        "error: unknown argument --connector",
    ],
    "missing-package": [
        "ModuleNotFoundError: No module named 'nats'",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "error: vLLM is not installed: pip install vllm",
    ],
    "compiler": [
        "nvcc fatal   : Unsupported gpu architecture 'compute_121'",
        "RuntimeError: Failed to find C compiler.",
    ],
    "overload": ["WARNING request refused: all workers are busy", "RouterQueueLimitExceeded: 512 requests wait"],
    "restart-limit": [
        "worker-1 ended with status 1, the 4th time within 60 s",
        "worker-1 ended with status 1 before it was ready",
    ],
}
HEALTHY = """\
INFO dynamo.frontend: listening on 0.0.0.0:8000
INFO dynamo.cpu: model demo loaded in 0.4 s, 512 blocks
INFO vllm: Using max model len 40960, tensor parallel size 4, trust_remote_code=False
INFO NCCL INFO Using network IB
INFO GET /v1/models 200
INFO lease 694d acquired, ttl 30 s
INFO registered v1/instances/dynamo/backend/generate/1
INFO event plane zmq, request plane tcp
INFO installed packages: nixl 1.5, prometheus-client 0.22
INFO draining: 0 requests; stopped
WARNING DYN_FOO: unknown variable, ignored
INFO dynamo.serving.open_requests: request refused status=400 error=Failed to deserialize the JSON body: missing field `role`
(EngineCore pid=7) INFO 11-24 00:39:19 engine with config: model='m', trust_remote_code=True, max_seq_len=8192
WARNING 11-24 flash_attn is not installed; another kernel is used
INFO waiting for the leader
"""


def names(*lines: str) -> list[str]:
    case = CaseFacts(logs={"worker-1.log": "\n".join(["INFO started", *lines, "INFO stopped"])})
    return [match.signature.name for match in matches(case, LOG_SIGNATURES)]


def test_each_signature_has_lines() -> None:
    assert sorted(LINES) == sorted(one.name for one in LOG_SIGNATURES)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines])
def test_line_is_found(name: str, line: str) -> None:
    assert name in names(line)


def test_healthy_log_has_no_failure() -> None:
    assert names(*HEALTHY.splitlines()) == []


def test_cause_and_next_command_are_given() -> None:
    for one in LOG_SIGNATURES:
        assert one.cause[0].isupper() or one.cause.startswith(("--", "etcd")), one.name
        assert not one.cause.endswith("."), one.name
        assert one.command, one.name
