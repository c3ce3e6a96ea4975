"""Faults that tests inject: refused, slow and lost requests, dropped watches, an unreachable server, compaction."""

import asyncio
import re
from dataclasses import dataclass, fields
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.cluster.kubernetes.errors import ApiError
from tests.cluster.kubernetes.storage import Storage

FAULTS_PATH = "/test/faults"
"""Route of this server alone: POST a rule or an action, GET the counts of requests."""


@dataclass(slots=True)
class FaultRule:
    """What happens to matching requests, `count` times (-1: always)."""

    method: str = ".*"
    path: str = ".*"
    status: int = 0
    """HTTP status of the refusal; 429 carries Retry-After. 0: the request is served after the delay."""
    delay_s: float = 0.0
    retry_after_s: int = 1
    count: int = 1
    user_agent: str = ".*"
    """Pattern of the clients that are affected: a split cuts off some of them."""

    def matches(self, request: Request) -> bool:
        return bool(
            self.count != 0 and re.fullmatch(self.method, request.method) and re.fullmatch(self.path, request.url.path)
            and re.match(self.user_agent, request.headers.get("user-agent", ""))
        )  # fmt: skip


class Faults:
    """Active rules."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.rules: list[FaultRule] = []
        self.counts: dict[str, int] = {}

    async def before(self, request: Request) -> Response | None:
        """Delay or refuse a request by the first rule that matches."""
        at = f"{request.method} {request.url.path}"
        self.counts[at] = self.counts.get(at, 0) + 1
        rule = next((one for one in self.rules if one.matches(request)), None)
        if rule is None:
            return None
        rule.count -= rule.count > 0
        await asyncio.sleep(rule.delay_s)
        if rule.status == 429:
            details = {"retryAfterSeconds": rule.retry_after_s}
            raise ApiError(429, "Too many requests, please try again later.", details=details)
        if rule.status:
            raise ApiError(rule.status, "injected by the test", "InternalError" if rule.status == 500 else "")
        return None

    def drop_watches(self) -> None:
        """End every watch."""
        for readers in self._storage.subscriptions.values():
            for reader in readers:
                reader.close()

    def act(self, message: dict[str, Any]) -> None:
        """Execute one message of the test: an action, or a rule."""
        match message.get("action"):
            case "compact":
                self._storage.compact()
            case "drop_watches":
                self.drop_watches()
            case "clear":
                self.rules.clear()
            case None:
                known = {one.name for one in fields(FaultRule)}
                if unknown := set(message) - known:
                    raise ApiError(400, f"unknown fields of a fault rule: {sorted(unknown)}; allowed: {sorted(known)}")
                self.rules.append(FaultRule(**message))
            case other:
                raise ApiError(400, f"action {other!r}: allowed are compact, drop_watches and clear")

    async def handle(self, request: Request) -> Response:
        """Serve FAULTS_PATH."""
        if request.method == "POST":
            try:
                self.act(await request.json())
            except ApiError as error:
                return JSONResponse(error.status(), error.code)
        body = {"writes": self._storage.writes, "revision": self._storage.revision, "requests": self.counts}
        return JSONResponse(body)
