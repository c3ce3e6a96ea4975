"""A released kube-apiserver with etcd, from the folder that KUBEBUILDER_ASSETS names."""

import os
import ssl
import subprocess
import urllib.request
from pathlib import Path
from typing import Self

import trustme
from benchmarks.ports import free_ports
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.cluster.kubernetes.kubeconfig import ADMIN_TOKEN, write_kubeconfig
from tests.cluster.processes import stop_process, wait_until

ASSETS = "KUBEBUILDER_ASSETS"


def released_assets() -> Path | None:
    """Return the folder with kube-apiserver and etcd, or None where there is none."""
    folder = Path(os.environ.get(ASSETS) or "/nonexistent")
    return folder if all((folder / name).is_file() for name in ("kube-apiserver", "etcd")) else None


class ReleasedKubernetes:
    """kube-apiserver and etcd, and kube-controller-manager where the folder has it; the block ends them."""

    def __init__(self, folder: Path, assets: Path, *, controllers: bool = False) -> None:
        self.folder, self._assets, self._controllers = folder, assets, controllers
        folder.mkdir(parents=True, exist_ok=True)
        self._client_port, self._peer_port, self._port = free_ports(3)
        self.url = f"https://127.0.0.1:{self._port}"
        self.token = ADMIN_TOKEN
        self._processes: list[subprocess.Popen[bytes]] = []
        self._write_credentials()
        self.ca = (folder / "ca.pem").read_bytes()
        self.kubeconfig = write_kubeconfig(folder / "kubeconfig", self.url, self.token, self.ca)

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
        etcd, peer = f"http://127.0.0.1:{self._client_port}", f"http://127.0.0.1:{self._peer_port}"
        self._start(
            "etcd", "--data-dir", self._path("etcd"), "--unsafe-no-fsync", "--log-level", "warn",
            "--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        )  # fmt: skip
        self._start(
            "kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", f"--secure-port={self._port}",
            f"--cert-dir={self.folder}", f"--tls-cert-file={self._path('tls.crt')}",
            f"--tls-private-key-file={self._path('tls.key')}", f"--token-auth-file={self._path('tokens.csv')}",
            "--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._path('sa.key')}",
            f"--service-account-signing-key-file={self._path('sa.key')}", "--service-cluster-ip-range=10.0.0.0/16",
            "--disable-admission-plugins=ServiceAccount", "--enable-priority-and-fairness=false", "--endpoint-reconciler-type=none",
        )  # fmt: skip
        wait_until(self.is_ready, "kube-apiserver is not ready")
        if self._controllers:
            self._start(
                "kube-controller-manager", f"--kubeconfig={self.kubeconfig}", "--use-service-account-credentials=false",
                "--controllers=garbage-collector-controller,namespace-controller,deployment-controller,"
                "replicaset-controller,job-controller,endpointslice-controller", "--leader-elect=false",
                f"--service-account-private-key-file={self._path('sa.key')}", f"--cert-dir={self.folder}",
                "--secure-port=0",
            )  # fmt: skip
        return self

    def is_ready(self) -> bool:
        """Return whether /readyz and the default namespace answer."""
        context = ssl.create_default_context(cadata=self.ca.decode())
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            for path in ("/readyz", "/api/v1/namespaces/default"):
                request = urllib.request.Request(self.url + path, headers=headers)
                urllib.request.urlopen(request, timeout=2, context=context).close()
        except OSError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
            stop_process(process)
