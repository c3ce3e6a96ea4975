"""Running the server: in a thread of a test, or as a process of its own."""

import asyncio
import json
import socket
import ssl
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any, Self

import trustme
import uvicorn
from tests.cluster.kubernetes.controllers import Controllers
from tests.cluster.kubernetes.faults import FAULTS_PATH
from tests.cluster.kubernetes.kubeconfig import ADMIN_TOKEN, write_kubeconfig
from tests.cluster.kubernetes.server import ApiServer
from tests.cluster.processes import wait_until


async def serve(server: ApiServer, listener: socket.socket, controllers: Controllers | None, **settings: Any) -> None:
    """Serve until cancelled; `settings` are those of uvicorn."""
    await server.start()
    config = uvicorn.Config(
        server.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1, access_log=False, **settings
    )
    tasks = [asyncio.create_task(controllers.run())] if controllers else []
    try:
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class KubernetesServer:
    """The server in a thread with an event loop of its own; the block ends it."""

    def __init__(
        self, folder: Path, *, controllers: bool = True, tls: bool = False, port: int = 0, ready_s: float = 0.0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.server = ApiServer()
        self.controllers = Controllers(self.server.api, ready_s=ready_s) if controllers else None
        self._listener = socket.create_server(("127.0.0.1", port))
        self.verify: ssl.SSLContext | bool = True
        self._settings: dict[str, Any] = {}
        self.ca: bytes | None = None
        if tls:
            self._settings, self.ca = _certificates(folder)
            self.verify = ssl.create_default_context(cadata=self.ca.decode())
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.token = ADMIN_TOKEN
        self.kubeconfig = write_kubeconfig(folder / "kubeconfig", self.url, self.token, self.ca)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._task: asyncio.Task[None] | None = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(serve(self.server, self._listener, self.controllers, **self._settings))
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self._task is not None and self.server.storage.revision > 4, "the API server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(15)
        self._listener.close()

    def act(self, **message: Any) -> Any:
        """Inject a fault or execute an action, and return the counts of requests."""
        if self.ca:
            raise ValueError("faults are injected through the plain server")
        body = json.dumps(message).encode()
        request = urllib.request.Request(self.url + FAULTS_PATH, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


def _certificates(folder: Path) -> tuple[dict[str, Any], bytes]:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    certificate, key = folder / "tls.crt", folder / "tls.key"
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    issued.private_key_pem.write_to_path(str(key))
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}, authority.cert_pem.bytes()


def run_in_foreground(folder: Path, port: int, *, controllers: bool, tls: bool, ready_s: float) -> None:
    """Serve in this thread until interrupted, and print the address and the path of the kubeconfig."""
    made = KubernetesServer(folder, controllers=controllers, tls=tls, port=port, ready_s=ready_s)
    print(json.dumps({"url": made.url, "kubeconfig": str(made.kubeconfig), "token": made.token}), flush=True)
    try:
        asyncio.run(serve(made.server, made._listener, made.controllers, **made._settings))
    except KeyboardInterrupt:
        sys.exit(0)
