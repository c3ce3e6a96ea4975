"""TLS: contexts from certificate and key files, with one-line errors that name the wrong setting."""

import logging
import os
import ssl
from typing import NamedTuple

from dynamo.core.errors import ConfigError

logger = logging.getLogger(__name__)


class PemFile(NamedTuple):
    """A file and the setting that names it; an empty path means that none is configured."""

    setting: str
    path: str

    def __bool__(self) -> bool:
        return bool(self.path)

    def __str__(self) -> str:
        return f"{self.setting} {self.path}"


def server_context(certificate: PemFile, key: PemFile, client_authority: PemFile) -> ssl.SSLContext:
    """Return a context that presents the certificate; with a client authority it accepts only clients signed by it.

    Raises `ConfigError`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_identity(context, certificate, key)
    if client_authority:
        _load_authority(context, client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authority: PemFile, certificate: PemFile, key: PemFile, *, is_insecure: bool) -> ssl.SSLContext:
    """Return a client context that accepts servers signed by the authority, or any if `is_insecure`.

    The context presents the certificate, if there is one. Raises `ConfigError`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority:
        _load_authority(context, authority)
    if is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        _load_identity(context, certificate, key)
    return context


class TlsIdentity:
    """A context's certificate and key, reloaded when their files change: they are renewed while the process runs."""

    def __init__(self, context: ssl.SSLContext, certificate: PemFile, key: PemFile) -> None:
        self._context = context
        self._files = certificate, key
        self._seen = self._file_states()

    def refresh(self) -> None:
        """Reload changed files for new handshakes; log an error and keep the loaded certificate if they are invalid."""
        seen = self._file_states()
        if seen == self._seen:
            return
        self._seen = seen
        certificate, key = self._files
        try:
            _load_identity(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)  # A failure would corrupt ours.
            _load_identity(self._context, certificate, key)
        except ConfigError as error:
            logger.warning("keeping the loaded TLS certificate, cannot reload it: %s", error)
        else:
            logger.info("reloaded TLS certificate: %s", certificate)

    def _file_states(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_file_state(file.path) for file in self._files)


def check_pair(one: PemFile, other: PemFile) -> None:
    """Raise `ConfigError` if only one of the two is given."""
    if bool(one) != bool(other):
        given, missing = (one, other) if one else (other, one)
        raise ConfigError(f"{given}: requires {missing.setting}; give the certificate and its key together")


def _load_identity(context: ssl.SSLContext, certificate: PemFile, key: PemFile) -> None:
    for file, kind in ((certificate, b"CERTIFICATE"), (key, b"PRIVATE KEY")):
        if kind not in _read(file):
            raise ConfigError(f"{file}: contains no {kind.decode().lower()}; expected PEM format")
    try:
        context.load_cert_chain(certificate.path, key.path, password=_no_password)
    except OSError as error:  # ssl.SSLError is a subclass
        raise ConfigError(f"{certificate} and {key}: {_reason(error)}") from None


def _load_authority(context: ssl.SSLContext, authority: PemFile) -> None:
    _read(authority)
    try:
        context.load_verify_locations(authority.path)
    except OSError as error:
        raise ConfigError(f"{authority}: {_reason(error)}") from None


def _read(file: PemFile) -> bytes:
    try:
        with open(file.path, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def _file_state(path: str) -> tuple[int, int, int]:
    """Return values that change with the file; a renewal may replace the file, or a symbolic link in its path."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_ino, status.st_size)


def _no_password() -> str:
    """Return an empty password, so that a protected key is refused instead of prompting on the terminal forever."""
    return ""


def _reason(error: OSError) -> str:
    words = getattr(error, "reason", None)
    return words.lower().replace("_", " ") if isinstance(words, str) else "not a valid certificate with its key"
