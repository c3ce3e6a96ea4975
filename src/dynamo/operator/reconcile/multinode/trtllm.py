"""TensorRT-LLM over several nodes: the leader starts all processes with mpirun; the workers run an SSH server for it."""

import shlex

from dynamo.operator.reconcile.multinode.commands import CommandLine, shell_script
from dynamo.operator.reconcile.multinode.nodes import NodeGroup
from dynamo.protocols.kubernetes.common import KubeObject

MODULE = "trtllm"
SECRET = "mpi-run-ssh-secret"  # noqa: S105 - the name of a Secret
KEYS = "/ssh-pk"
SSH_PORT = 2222
NAMES_TIMEOUT_S = 300
FULL_NAMES = {"name": "OMPI_MCA_orte_keep_fqdn_hostnames", "value": "1"}
"""Makes Open MPI connect to full names; the short names of pods do not resolve."""
EXPORTED = frozenset({
    "CUDA_VISIBLE_DEVICES", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HOME", "HF_TOKEN", "HOME", "HUGGING_FACE_HUB_TOKEN",
    "LD_LIBRARY_PATH", "MODEL_PATH", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "PATH", "PYTHONPATH",
    "TENSORRT_LLM_CACHE_DIR", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_CACHE", "TRTLLM_USE_UCX_KVCACHE", "USER",
})  # fmt: skip
"""Variables that mpirun passes on besides those of the container."""
READY = {
    "tcpSocket": {"port": SSH_PORT},
    "initialDelaySeconds": 20,
    "periodSeconds": 20,
    "timeoutSeconds": 5,
    "failureThreshold": 10,
}
"""Readiness of a worker: its SSH server accepts connections."""
# $HOME, not ~: the image may set HOME, while ~ is the home directory of the user in /etc/passwd.
CLIENT = f"""\
set -e
mkdir -p "$HOME/.ssh"
cp {KEYS}/private.key "$HOME/.ssh/id_rsa"
cp {KEYS}/private.key.pub "$HOME/.ssh/id_rsa.pub"
cp {KEYS}/private.key.pub "$HOME/.ssh/authorized_keys"
chmod 600 "$HOME/.ssh/id_rsa" "$HOME/.ssh/authorized_keys"
chmod 644 "$HOME/.ssh/id_rsa.pub"
printf 'Host *\\nIdentityFile %s/.ssh/id_rsa\\nStrictHostKeyChecking no\\nPort {SSH_PORT}\\n' "$HOME" > "$HOME/.ssh/config"
"""
# StrictModes no: the home directory may belong to another user than the one that runs sshd.
SERVER = f"""\
mkdir -p "$HOME/.ssh/host_keys" "$HOME/.ssh/run"
for type in rsa ecdsa ed25519; do
  key="$HOME/.ssh/host_keys/ssh_host_${{type}}_key"
  [ -f "$key" ] || ssh-keygen -q -t "$type" -f "$key" -N ''
done
cat > "$HOME/.ssh/sshd_config" <<END
Port {SSH_PORT}
HostKey $HOME/.ssh/host_keys/ssh_host_rsa_key
HostKey $HOME/.ssh/host_keys/ssh_host_ecdsa_key
HostKey $HOME/.ssh/host_keys/ssh_host_ed25519_key
PidFile $HOME/.ssh/run/sshd.pid
AuthorizedKeysFile $HOME/.ssh/authorized_keys
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
PubkeyAuthentication yes
END
exec /usr/sbin/sshd -D -f "$HOME/.ssh/sshd_config"
"""


def leader_command(command: CommandLine, group: NodeGroup, gpus: int) -> CommandLine:
    """Return the command that starts one process for each GPU of all nodes."""
    variables = " ".join(f"-x {name}" for name in sorted({*EXPORTED, *command.variables}))
    program = shlex.quote(command.started_by("trtllm-llmapi-launch", MODULE))
    as_root = '$([ "$(id -u)" = "0" ] && echo --allow-run-as-root)'
    remote = f"-p {SSH_PORT} -o StrictHostKeyChecking=no -i $HOME/.ssh/id_rsa"
    run = (
        f"exec mpirun {as_root} --oversubscribe -n {group.size * gpus} -H {','.join(group.hosts)} --mca pml ob1 "
        f'--mca plm_rsh_args "{remote}" {variables} bash -c {program}\n'
    )
    return shell_script(CLIENT + (_wait_for_names(group) if group.waits_for_names else "") + run, command.variables)


def worker_command(command: CommandLine) -> CommandLine:
    """Return the command of an SSH server that accepts the leader's key."""
    return shell_script(CLIENT + SERVER, command.variables)


def add_keys(spec: KubeObject, main: KubeObject, secret: str) -> None:
    """Mount the Secret with the key pair that all nodes share."""
    main.setdefault("volumeMounts", []).append({"name": secret, "mountPath": KEYS, "readOnly": True})
    volume = {"name": secret, "secret": {"secretName": secret, "defaultMode": 0o644}}
    spec.setdefault("volumes", []).append(volume)


def _wait_for_names(group: NodeGroup) -> str:
    return (
        f"i=0\nfor worker in {' '.join(group.hosts[1:])}; do\n"
        '  until getent hosts "$worker" > /dev/null; do\n'
        f'    i=$((i + 1)); [ "$i" -lt {NAMES_TIMEOUT_S // 2} ] || {{ echo "cannot resolve $worker" >&2; exit 1; }}\n'
        "    sleep 2\n  done\ndone\n"
    )
