"""A released kube-apiserver with etcd, from the folder that KUBEBUILDER_ASSETS names."""

import os
import ssl
import subprocess
from pathlib import Path
from typing import Self

import httpx
import trustme
from benchmarks.ports import free_ports
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.cluster.kubernetes.kubeconfig import ADMIN_TOKEN, write_kubeconfig
from tests.cluster.kubernetes.node import NodeAgent
from tests.cluster.kubernetes.reset import Reset
from tests.cluster.processes import stop_process, wait_until

ASSETS = "KUBEBUILDER_ASSETS"
REQUIRED = ("kube-apiserver", "etcd")
MANAGER = "kube-controller-manager"
CONTROLLERS = (
    "garbage-collector-controller", "namespace-controller", "deployment-controller", "replicaset-controller",
    "job-controller", "endpointslice-controller", "serviceaccount-controller",
    "persistentvolumeclaim-protection-controller",
)  # fmt: skip


def released_assets() -> Path | None:
    """Return the folder with kube-apiserver and etcd, or None where there is none."""
    folder = Path(os.environ.get(ASSETS) or "/nonexistent")
    return folder if all((folder / name).is_file() for name in REQUIRED) else None


class ReleasedKubernetes:
    """kube-apiserver and etcd; with `controllers` also kube-controller-manager and a node that runs the pods.

    The block ends them. RBAC applies to every user but the administrator.
    """

    def __init__(self, folder: Path, assets: Path, *, controllers: bool = False) -> None:
        self.folder, self._assets = folder, assets
        self._controllers = controllers and (assets / MANAGER).is_file()
        folder.mkdir(parents=True, exist_ok=True)
        self._client_port, self._peer_port, self.port = free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self.token = ADMIN_TOKEN
        self._processes: list[subprocess.Popen[bytes]] = []
        self._write_credentials()
        self.ca: bytes | None = (folder / "ca.pem").read_bytes()
        self.verify: ssl.SSLContext | bool = ssl.create_default_context(cafile=self._path("ca.pem"))
        self.kubeconfig = write_kubeconfig(folder / "kubeconfig", self.url, self.token, self.ca)
        self._node = NodeAgent(self.url, self.token, self.verify)
        self._reset = Reset(self.url, self.token, self.verify)

    def _write_credentials(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self._path("ca.pem"))
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.cert_chain_pems[0].write_to_path(self._path("tls.crt"))
        issued.private_key_pem.write_to_path(self._path("tls.key"))
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (self.folder / "sa.key").write_bytes(pem)
        (self.folder / "tokens.csv").write_text(f'{self.token},admin,admin,"system:masters"\n')

    def _path(self, name: str) -> str:
        return str(self.folder / name)

    def _start(self, name: str, *flags: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [str(self._assets / name), *flags]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def __enter__(self) -> Self:
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self) -> None:
        etcd, peer = f"http://127.0.0.1:{self._client_port}", f"http://127.0.0.1:{self._peer_port}"
        self._start(
            "etcd", "--data-dir", self._path("etcd"), "--unsafe-no-fsync", "--log-level", "warn",
            "--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        )  # fmt: skip
        self._start(
            "kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", f"--secure-port={self.port}",
            f"--cert-dir={self.folder}", f"--tls-cert-file={self._path('tls.crt')}",
            f"--tls-private-key-file={self._path('tls.key')}", f"--token-auth-file={self._path('tokens.csv')}",
            "--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._path('sa.key')}",
            f"--service-account-signing-key-file={self._path('sa.key')}", "--service-cluster-ip-range=10.0.0.0/16",
            *(() if self._controllers else ("--disable-admission-plugins=ServiceAccount",)),
            "--enable-priority-and-fairness=false", "--endpoint-reconciler-type=none", "--allow-privileged=true",
        )  # fmt: skip
        wait_until(self.is_ready, "kube-apiserver is not ready")
        if self._controllers:
            self._start(
                MANAGER, f"--kubeconfig={self.kubeconfig}", "--use-service-account-credentials=false",
                f"--controllers={','.join(CONTROLLERS)}", "--leader-elect=false",
                f"--service-account-private-key-file={self._path('sa.key')}", f"--cert-dir={self.folder}",
                "--secure-port=0", "--kube-api-qps=200", "--kube-api-burst=400",
            )  # fmt: skip
            self._node.start()
            wait_until(lambda: self._exists("/api/v1/namespaces/default/serviceaccounts/default"), "no default account")
        self._reset.remember()

    def is_ready(self) -> bool:
        """Return whether /readyz and the default namespace answer."""
        return self._exists("/readyz") and self._exists("/api/v1/namespaces/default")

    def _exists(self, path: str) -> bool:
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            return httpx.get(self.url + path, headers=headers, verify=self.verify, timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def reset(self) -> None:
        """Delete what was made since the start."""
        self._reset.delete_all()

    def __exit__(self, *_: object) -> None:
        self._node.stop()
        self._reset.close()
        for process in reversed(self._processes):
            process.terminate()
            stop_process(process)
