"""S3: an object store over HTTP, with the operations that blocks and files need: put if absent, get, head.

obstore sends and signs the requests. Its calls run on an event loop in a thread of their own, because only there a call
can be given a deadline.
"""

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from dynamo.core.errors import ConfigError
from dynamo.core.extras import install_command
from dynamo.kvbm.physical.objects import ObjectFailure

T = TypeVar("T")

READ_BYTES = 1 << 20  # Bytes of a download that are written at once.
RETRIES = 2  # Of a request whose connection broke, or that the store refused as overloaded; within the deadline.
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of requests; without a key, requests are not signed."""

    access_key: str = ""
    secret_key: str = ""
    region: str = "us-east-1"
    session_token: str = ""
    """Session token of temporary keys."""

    def provide(self) -> dict[str, str | None]:
        """Return the credentials in obstore's form; they take precedence over those of the environment."""
        return {
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "token": self.session_token or None,
            "expires_at": None,
        }


class S3Objects:
    """One bucket, with path-style addresses."""

    def __init__(
        self, endpoint: str, bucket: str, credentials: Credentials, *, variable: str = "DYN_KVBM_OBJECT_ENDPOINT"
    ) -> None:
        """Raise `ConfigError` for an invalid endpoint, naming its variable `variable`, and if obstore is missing."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{variable}={endpoint!r}: must be http(s)://host[:port] or file:///path")
        if not bucket:
            raise ConfigError("DYN_KVBM_OBJECT_BUCKET: must be set to the bucket's name")
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
            from obstore.store import S3Store
        except ImportError:
            raise ConfigError(f"{variable}: the package obstore is missing: {install_command('s3')}") from None
        self._obstore = obstore
        self._exists: type[Exception] = AlreadyExistsError
        self._missing: tuple[type[Exception], ...] = (NotFoundError, FileNotFoundError)
        self._error: type[Exception] = BaseError
        signing: dict[str, Any] = {"credential_provider": credentials.provide}
        try:
            self._store = S3Store(
                bucket,
                endpoint=endpoint.rstrip("/"),
                region=credentials.region,
                virtual_hosted_style_request=False,
                client_options={"allow_http": True},
                retry_config={"max_retries": RETRIES},
                **(signing if credentials.access_key else {"skip_signature": True}),
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{variable}={endpoint!r}: {_first_line(error)}") from None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvbm-s3", daemon=True)
        self._thread.start()

    def put(self, name: str, parts: tuple[bytes, memoryview], timeout_s: float) -> None:
        async def put() -> None:
            body = b"".join(parts)
            try:
                await self._obstore.put_async(self._store, name, body, mode="create", use_multipart=False)
            except self._exists:
                return  # Blocks are named by their content.

        self._call(put(), f"PUT {name}", timeout_s)

    def get(self, name: str, size: int, timeout_s: float) -> bytes | None:
        async def get() -> bytes | None:
            found = await self._find(name, size)
            return None if found is None else bytes(await found.bytes_async())

        return self._call(get(), f"GET {name}", timeout_s)

    def download(self, name: str, file: BinaryIO, size: int, timeout_s: float) -> bool:
        """Download an object of at most `size` bytes to a file; return False if none exists. Raise `ObjectFailure`."""

        async def download() -> bool:
            found = await self._find(name, size)
            if found is None:
                return False
            async for piece in found.stream(min_chunk_size=READ_BYTES):
                file.write(piece)
            return True

        return self._call(download(), f"GET {name}", timeout_s)

    def has(self, name: str, timeout_s: float) -> bool:
        async def has() -> bool:
            try:
                await self._obstore.head_async(self._store, name)
            except self._missing:
                return False
            return True

        return self._call(has(), f"HEAD {name}", timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _find(self, name: str, size: int) -> Any:
        """Return the response with an object of at most `size` bytes, None if there is none."""
        try:
            found = await self._obstore.get_async(self._store, name)
        except self._missing:
            return None
        if found.meta["size"] > size:
            raise ObjectFailure(f"GET {name}: more than {size} bytes")
        return found

    def _call(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        """Run `work` on the loop within a deadline. Raise `ObjectFailure`."""
        try:
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self._loop).result()
        except TimeoutError:
            raise ObjectFailure(f"{what}: not complete within {timeout_s:g} s") from None
        except (self._error, OSError) as error:
            raise ObjectFailure(f"{what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Return the first line of obstore's error, which otherwise has a page of debugging output."""
    return str(error).strip().partition("\n")[0]
