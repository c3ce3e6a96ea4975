"""Probe of a router: sends small requests to a running frontend and records which workers they reach."""

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dynamo.core.errors import DynamoException, HttpError
from dynamo.http.client import ChatClient
from dynamo.ops.router_health import ChatResult, request_once
from dynamo.ops.router_modes import (
    BUSY_ROUNDS,
    DEVICE_AWARE,
    LOAD_MODES,
    RANDOM_ROUNDS,
    REPEATS,
    ROUNDS,
    RouterObservation,
    cached_blocks,
    has_device_groups,
)

WORKERS_MAX = 32
PREFIX_WORDS = 400  # Several blocks of any usual size.
BUSY_TOKENS = (8192, 1024, 192)
"""Tokens of a long request: more than one of `TOKENS` takes; the first that the model's context allows."""
BUSY_WAIT_S = 30.0
EVENTS_S, EVENTS_POLL_S = 5.0, 0.05
"""Longest wait for the KV events of a response, which may arrive after it."""
TOKENS = 2


class RouterProbe:
    """Requests to one model of a frontend."""

    def __init__(self, client: ChatClient, model: str) -> None:
        self._client = client
        self._model = model
        self._nonce = secrets.token_hex(4)  # Prompts of an earlier probe must not be cached.

    def observe(self, mode: str, workers: frozenset[str], devices: Mapping[str, str]) -> RouterObservation:
        """Return what the requests that a mode needs for its proof have shown; `devices` of the workers that register one."""
        if mode == "kv":
            results = [self._send(f"{self._prefix()} Question 0.")]
            self._wait_indexed(results[0])
            results += [self._send(f"{self._prefix()} Question {number}.") for number in range(1, REPEATS + 1)]
            return RouterObservation(
                workers=workers,
                repeated=tuple(one.worker for one in results),
                explanations=tuple(self._explanation(one) for one in results),
            )
        if mode == "direct":
            directed = {
                worker: self._send("Hello.", {"backend_instance_id": int(worker)}).worker for worker in sorted(workers)
            }
            return RouterObservation(workers=workers, directed=directed, undirected_error=self._send("Hello.").error)
        size = min(len(workers), WORKERS_MAX)
        count = ROUNDS * size if mode in LOAD_MODES | {"round-robin"} else max(ROUNDS * size, RANDOM_ROUNDS)
        unrelated = tuple(self._send(f"{self._nonce} {number}: say hello.").worker for number in range(count))
        if mode == DEVICE_AWARE and has_device_groups(devices):
            return RouterObservation(workers=workers, devices=devices, unrelated=unrelated)
        busy, shorts = (len(workers) - 1, len(workers)) if mode in LOAD_MODES else (1, BUSY_ROUNDS * size)
        held, meanwhile = self._while_busy(busy, shorts)
        return RouterObservation(workers=workers, devices=devices, unrelated=unrelated, held=held, meanwhile=meanwhile)

    def _prefix(self) -> str:
        return " ".join(f"{self._nonce} item {number}" for number in range(PREFIX_WORDS // 3))

    def _wait_indexed(self, result: ChatResult) -> None:
        """Send the first prompt to its worker again, which alone caches it then, until a decision sees its blocks.

        A router that explains no decision is not waited for.
        """
        ends_s = time.monotonic() + EVENTS_S
        while result.worker and time.monotonic() < ends_s:
            named = {"backend_instance_id": int(result.worker)}
            explanation = self._explanation(self._send(f"{self._prefix()} Question 0.", named))
            if not explanation or cached_blocks(explanation):
                return
            time.sleep(EVENTS_POLL_S)

    def _send(self, prompt: str, nvext: Mapping[str, Any] | None = None) -> ChatResult:
        return request_once(self._client, self._model, prompt, TOKENS, nvext)

    def _explanation(self, result: ChatResult) -> Mapping[str, Any]:
        """Return the KV router's decision about a request; empty if there is none."""
        with contextlib.suppress(DynamoException):
            for model in self._client.decisions(request_id=result.request_id):
                for decision in model.get("decisions") or ():
                    return dict(decision)
        return {}

    def _while_busy(self, count: int, shorts: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the workers of `count` long requests, and those of `shorts` short ones sent while they run."""
        end = threading.Event()
        with ThreadPoolExecutor(max(1, count)) as pool:
            held: list[str] = []
            try:
                for number in range(count):
                    started: Future[str] = Future()
                    pool.submit(self._hold, f"{self._nonce} long {number}", started, end)
                    held.append(started.result(BUSY_WAIT_S))
                sent = tuple(self._send(f"{self._nonce} meanwhile {number}").worker for number in range(shorts))
                return tuple(held), sent
            except (TimeoutError, DynamoException):
                return (), ()
            finally:
                end.set()

    def _hold(self, prompt: str, started: "Future[str]", end: threading.Event) -> None:
        """Keep a worker busy until `end`; set its id with the first chunk that contains it."""
        try:
            for tokens in BUSY_TOKENS:
                with contextlib.suppress(HttpError):  # Longer than the model's context.
                    self._stream(prompt, tokens, started, end)
                    break
        except DynamoException as error:
            if not started.done():
                started.set_exception(error)
        finally:
            if not started.done():
                started.set_result("")

    def _stream(self, prompt: str, tokens: int, started: "Future[str]", end: threading.Event) -> None:
        options = {"max_tokens": tokens, "ignore_eos": True, "nvext": {"extra_fields": ["worker_id"]}}
        chunks = self._client.chunks(self._model, [{"role": "user", "content": prompt}], options)
        with contextlib.closing(chunks):
            for chunk in chunks:
                worker = ChatResult(response=chunk).worker
                if worker and not started.done():
                    started.set_result(worker)
                if end.is_set():
                    return
