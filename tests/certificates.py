"""Certificates: an authority, certificates that it signs, and one of an untrusted authority; created for each run."""

from pathlib import Path

import trustme


class Certificates:
    """Paths of PEM files, as settings name them."""

    def __init__(self, folder: Path, *names: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        authority, untrusted_authority = trustme.CA(), trustme.CA()
        self.ca, self.other_ca = self._path("ca.pem"), self._path("other-ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        untrusted_authority.cert_pem.write_to_path(self.other_ca)
        self.cert, self.key = self._issue(authority, "server", *(names or ("127.0.0.1", "localhost")))
        self.client_cert, self.client_key = self._issue(authority, "client", "client.test")
        self.other_cert, self.other_key = self._issue(untrusted_authority, "other", "client.test")

    def _issue(self, authority: trustme.CA, name: str, *hosts: str) -> tuple[str, str]:
        issued = authority.issue_cert(*hosts)
        cert, key = self._path(f"{name}.pem"), self._path(f"{name}-key.pem")
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return cert, key

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def variables(self) -> dict[str, str]:
        """Settings for both roles, with client certificates."""
        return {
            "DYN_TCP_TLS_CERT_PATH": self.cert,
            "DYN_TCP_TLS_KEY_PATH": self.key,
            "DYN_TCP_TLS_CA_CERT_PATH": self.ca,
            "DYN_TCP_TLS_CLIENT_CERT_PATH": self.client_cert,
            "DYN_TCP_TLS_CLIENT_KEY_PATH": self.client_key,
            "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": self.ca,
        }
