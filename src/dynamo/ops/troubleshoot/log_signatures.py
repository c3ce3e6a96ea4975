"""Signatures of lines in logs and events: resources, models, servers, settings and libraries. Pure."""

import re

from dynamo.ops.report import CheckStatus
from dynamo.ops.troubleshoot.signature import Signature


def of_lines(
    name: str,
    pattern: str,
    cause: str,
    command: str,
    *,
    status: CheckStatus = CheckStatus.FAIL,
    is_symptom: bool = False,
) -> Signature:
    """Return a signature of lines that match a pattern, regardless of case."""
    return Signature(
        name=name,
        pattern=re.compile(pattern, re.IGNORECASE),
        cause=cause,
        command=command,
        status=status,
        is_symptom=is_symptom,
    )


RESOURCES = (
    of_lines(
        "gpu-memory",
        r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks|CUDA_ERROR_OUT_OF_MEMORY"
        r"|Free memory on device .* is less than desired GPU memory utilization",
        "The model and its KV cache do not fit into the GPU's free memory, or another process uses it",
        "nvidia-smi; then lower --gpu-memory-utilization or --max-model-len, or raise --tensor-parallel-size",
    ),
    of_lines(
        "kv-cache-too-small",
        r"larger than the maximum number of tokens that can be stored in KV cache|To serve at least one request with the"
        r"|KV cache .* (?:is needed|needed), which is larger than the available",
        "The KV cache is smaller than one request of the maximum length",
        "lower --max-model-len, or raise --gpu-memory-utilization",
    ),
    of_lines(
        "host-memory",
        r"was killed by SIGKILL|Out of memory: Killed process|oom-kill|(?<!OutOf)MemoryError\b|Cannot allocate memory",
        "The system ended the process because memory ran out, or a user killed it",
        "dmesg | grep -i oom; then raise the memory limit, or start fewer workers",
    ),
    of_lines(
        "shared-memory",
        r"Bus error|insufficient shared memory|unable to (?:open|allocate) shared memory|/dev/shm.*No space left"
        r"|No space left on device.*shm",
        "The shared memory (/dev/shm) is too small: containers have 64 MiB by default",
        "set sharedMemory of the component (Kubernetes) or docker run --shm-size=8g",
    ),
    of_lines(
        "disk-full",
        r"No space left on device(?!.*shm)|Disk quota exceeded|ENOSPC|database space exceeded",
        "A disk is full",
        "df -h; dynamo doctor lists the directories that processes write to",
    ),
    of_lines(
        "open-files",
        r"Too many open files|EMFILE",
        "The limit of open files is reached: each client and each worker connection takes one",
        "ulimit -n 65536 before the start, or LimitNOFILE of the service",
    ),
    of_lines(
        "port-clash",
        r"the port is in use|is in use by another process|Address already in use|EADDRINUSE|bind\(\) failed.*98",
        "Another process listens on the port",
        "dynamo doctor names that process; choose another port with the flag of the message",
    ),
)
GPUS = (
    of_lines(
        "gpu-absent",
        r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|libcuda\.so\.1: cannot open"
        r"|Failed to infer device type",
        "The process sees no GPU: none is assigned to it, or the driver is not visible in the container",
        "nvidia-smi in the same environment; docker run --gpus all, or resources.limits.gpu of the component",
    ),
    of_lines(
        "gpu-driver",
        r"CUDA driver version is insufficient|no kernel image is available|Driver/library version mismatch"
        r"|forward compatibility was attempted|provided PTX was compiled with an unsupported toolchain|unsatisfied condition: cuda",
        "The driver is too old for this build of CUDA, or the build lacks this GPU's architecture",
        "nvidia-smi shows the driver's CUDA version; update the driver or use an image for that version",
    ),
    of_lines(
        "gpu-fault",
        r"NVRM: Xid|CUDA error: (?:an illegal memory access|uncorrectable ECC|unspecified launch failure|device-side assert)"
        r"|fell off the bus",
        "A GPU reported a fault; the process cannot continue on it",
        "nvidia-smi -q -d ECC,ROW_REMAPPER; drain the node and reset the GPU",
    ),
    of_lines(
        "nccl",
        r"ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclRemoteError|NCCL error|NCCL WARN (?!.*deprecated)",
        "Ranks of one engine cannot communicate",
        "repeat with NCCL_DEBUG=INFO; check /dev/shm, NCCL_SOCKET_IFNAME and NCCL_IB_HCA",
    ),
    of_lines(
        "slow-transport",
        r"NET/Socket|falling back to TCP|no RDMA|UCX\s+(?:ERROR|WARN).*(?:no usable|not available|transport)"
        r"|NCCL_IB_DISABLE set by environment to 1",
        "KV blocks or collectives use TCP instead of RDMA; first tokens of disaggregated requests take much longer",
        "check UCX_TLS, UCX_NET_DEVICES, NCCL_IB_HCA, and that pods have the RDMA resource and IPC_LOCK",
        status=CheckStatus.WARN,
    ),
    of_lines(
        "multinode-leader",
        r"DistStoreError|Timed out (?:after \d+ seconds )?waiting for clients|rendezvous.*(?:timed? ?out|failed)"
        r"|client socket has timed out.*connect",
        "A node of a multi-node engine does not reach its leader",
        "kubectl get pods -o wide; check that all nodes of the engine run, and the leader's address and port",
    ),
    of_lines(
        "nixl-backend",
        r"NIXL_ERR_\w+|nixl\w*Error|Failed to create (?:NIXL )?backend|NIXL is not available|nixl.*backend.*not found",
        "NIXL has no usable backend for the transfer of KV blocks",
        "python -c 'import nixl'; check UCX_TLS, and that prefill and decode workers have the same NIXL release",
    ),
)
MODELS = (
    of_lines(
        "model-auth",
        r"GatedRepoError|401 Client Error|403 Client Error|gated repo|repository is gated|Access to model .* is restricted"
        r"|Invalid user token|Invalid username or password",
        "The Hugging Face hub refuses the download: the model is gated or private, and the token is missing or wrong",
        "accept the model's terms on the hub; set HF_TOKEN, in Kubernetes the secret hf-token-secret",
    ),
    of_lines(
        "model-path",
        r"model (?:directory )?\S+: (?:no such directory|is a file)|not a valid (?:name on the Hugging Face hub|model identifier)"
        r"|RepositoryNotFoundError|no such repository on the Hugging Face hub|Repo id must be in the form"
        r"|Can't load (?:the )?(?:configuration|tokenizer) (?:of|for)",
        "The model's path or name does not exist for this process",
        "dynamo doctor MODEL; in Kubernetes check the mount path of the model cache",
    ),
    of_lines(
        "model-incomplete",
        r"config\.json is missing|tokenizer\.json is missing|the checkpoint has no tensor|SafetensorError|HeaderTooLarge"
        r"|MetadataIncompleteBuffer|InvalidHeaderDeserialization|git-lfs\.github\.com",
        "Files of the model are missing, truncated, or Git LFS pointers",
        "dynamo doctor MODEL names them; download the model again",
    ),
    of_lines(
        "model-network",
        r"Hugging Face hub is unreachable|LocalEntryNotFoundError|huggingface\.co.*(?:Max retries|Temporary failure|timed out)"
        r"|(?:Max retries|Temporary failure).*huggingface\.co|outgoing traffic has been disabled",
        "The Hugging Face hub cannot be reached, and the model is not in the local cache",
        "download the model where there is network access and set HF_HOME, or correct HTTPS_PROXY",
    ),
    of_lines(
        "model-architecture",
        r"architectures? \[?.* (?:is|are) not supported|unsupported (?:model )?architecture|Unrecognized (?:model|configuration class)"
        r"|does not recognize this architecture",
        "The engine's release does not support this model",
        "update the engine, or choose another one with --engine",
    ),
    of_lines(
        "remote-code",
        r"(?:pass|set|use|argument|option|requires?)\b.{0,60}trust_remote_code=True",
        "The model contains code that the engine does not execute without permission",
        "review that code, then add --trust-remote-code",
    ),
    of_lines(
        "context-length",
        r"max_model_len .*is greater than the derived|max_model_len.*exceeds",
        "--max-model-len exceeds the model's context length",
        "lower --max-model-len to the value in the message",
    ),
    of_lines(
        "parallel-size",
        r"must be divisible by (?:tensor|the) parallel|world size .* (?:larger|greater) than (?:the )?(?:number|available)"
        r"|Not enough GPUs|requires? \d+ GPUs? but only",
        "The parallel sizes do not fit the model's heads or the number of GPUs",
        "choose --tensor-parallel-size among the divisors of the attention heads, at most the number of GPUs",
    ),
    of_lines(
        "parser",
        r"--dyn-(?:tool-call|reasoning)-parser \S+: |unknown (?:tool.call|reasoning) parser|invalid tool call parser",
        "The tool-call or reasoning parser does not exist, or does not fit the model",
        "docs/parsers.md lists the parsers by model family",
    ),
)
SERVERS = (
    of_lines(
        "etcd-down",
        r"no response from etcd|waiting for etcd|etcd unreachable|Unable to create lease|etcd.*(?:connection refused|deadline exceeded)",
        "etcd does not respond; processes cannot register and keep their last view",
        "dynamo doctor; check ETCD_ENDPOINTS and the pods of etcd",
    ),
    of_lines(
        "lease-lost",
        r"lease (?:\w+ )?(?:expired|lost|not found|revoked)|were not registered again after the outage|requested lease not found",
        "A process lost its lease: it was paused, or etcd was unreachable for longer than the lease",
        "compare the time with etcd's log; raise ETCD_LEASE_TTL if hosts are paused for so long",
        status=CheckStatus.WARN,
    ),
    of_lines(
        "nats-down",
        r"no NATS server at|not connected to NATS|connection to NATS at \S+ lost|nats.*(?:connection refused|no servers available)",
        "NATS does not respond",
        "dynamo doctor; check NATS_SERVER and the pods of NATS",
    ),
    of_lines(
        "server-credentials",
        r"authorization rejected|Authorization Violation|ETCD_AUTH_USERNAME.*rejected|etcdserver: (?:authentication failed|permission denied)",
        "etcd or NATS refuses the credentials",
        "check ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD, or NATS_AUTH_*",
    ),
    of_lines(
        "certificate",
        r"CERTIFICATE_VERIFY_FAILED|untrusted certificate|certificate of \S+ is not trusted|certificate has expired"
        r"|x509: certificate",
        "A certificate is not trusted, has expired, or is for another name",
        "openssl s_client -connect HOST:PORT; check the CA file and both clocks (dynamo doctor)",
    ),
    of_lines(
        "discovery-directory",
        r"DYN_FILE_KV=\S+: (?:mode|owned by|cannot write|Not a directory|Permission denied)",
        "Processes refuse the discovery directory, because other users can write to it or this user cannot",
        "dynamo doctor; set DYN_FILE_KV to a directory of this user",
    ),
    of_lines(
        "kubernetes-role",
        r"requires the role of Kubernetes discovery|is forbidden: User|cannot (?:get|list|watch|patch|create) resource",
        "The service account lacks a role",
        "kubectl auth can-i --list --as system:serviceaccount:NAMESPACE:NAME",
    ),
    of_lines(
        "prometheus-down",
        r"prometheus.*(?:connection refused|no connection to|unreachable|Name or service not known)|no connection to \S*prometheus",
        "The planner cannot read metrics and does not scale",
        "check PROMETHEUS_ENDPOINT, and that Prometheus scrapes the frontend",
    ),
)
PROCESSES = (
    of_lines(
        "event-plane-mismatch",
        r"uses a different event plane",
        "Processes use different event planes; routers do not receive KV events and load",
        "set the same --event-plane (DYN_EVENT_PLANE) for all processes",
    ),
    of_lines(
        "no-prefill-worker",
        r"no prefill worker is left|no prefill workers? (?:is |are )?(?:available|found)|has no prefill worker",
        "Decode workers run without prefill workers",
        "start prefill workers (--disaggregation-mode prefill) in the same namespace, and read their logs",
        status=CheckStatus.WARN,
    ),
    of_lines(
        "wire-version",
        r"malformed (?:batched|request|response|control) (?:frame|stream)|malformed (?:request|response) from"
        r"|unsupported (?:protocol|wire) version|^(?!.*JSON body).*(?:unknown variant `|missing field `)",
        "Two processes of different releases cannot read each other's messages",
        "dynamo doctor shows the versions; use one release for all processes of a graph",
    ),
    of_lines(
        "unresponsive-worker",
        r"worker \S+ unresponsive; migrating|health check of \S+ failed",
        "A worker does not respond: it is paused, overloaded, or its engine hangs",
        "read the worker's log at that time; py-spy dump --pid PID shows where it waits",
        status=CheckStatus.WARN,
    ),
    of_lines(
        "wrong-flag",
        r"unknown argument --|unrecognized arguments: |the following arguments are required|error: --\S+ \S+: must be",
        "A flag of the command line is not known or has a wrong value",
        "run the component with --help-all; docs/reference/flags.md lists all flags",
    ),
    of_lines(
        "connector-flag",
        r"--connector\b.*(?:deprecated|removed|no longer|unrecognized|unknown)|unknown argument --connector",
        "--connector was removed; the worker exits at its start",
        'use --kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\'',
    ),
    of_lines(
        "missing-package",
        r"ModuleNotFoundError: No module named|ImportError: (?:cannot import|lib)|error: .*is not installed",
        "A Python package or a system library is missing in the environment of the process",
        "dynamo doctor lists the extras; install the one that the message names",
    ),
    of_lines(
        "compiler",
        r"nvcc fatal|Failed to find C compiler|Ninja is required|fatal error: Python\.h",
        "The engine compiles kernels at its start, and the compiler or headers are missing",
        "install gcc, python3-dev and the CUDA toolkit, or use the engine's image",
    ),
    of_lines(
        "overload",
        r"all workers are busy|queue limit exceeded|RouterQueueLimitExceeded|Service temporarily unavailable.*busy",
        "Requests exceed the workers' capacity and are refused with 503",
        "add workers, raise the busy thresholds, or let the planner scale",
        status=CheckStatus.WARN,
    ),
    of_lines(
        "restart-limit",
        r"the \d+th time within \d+ s|ended with status \d+ before it was ready",
        "A process ends again and again",
        "read the end of its log; the causes above name the reason",
        is_symptom=True,
    ),
)
LOG_SIGNATURES = (*RESOURCES, *GPUS, *MODELS, *SERVERS, *PROCESSES)
