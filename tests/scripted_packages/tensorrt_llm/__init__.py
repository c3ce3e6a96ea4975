"""Scripted TensorRT-LLM: an `LLM` that repeats its prompt, keeps its events for polling, and transfers prefill results."""

import asyncio
import copy
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import echo
from tests.unit.trtllm import scripted
from tests.unit.trtllm.scripted import SamplingParams

__all__ = ["LLM", "SamplingParams"]


class Result:
    """Response of a request: cumulative at each step, or complete when streaming is off."""

    def __init__(self, llm: "LLM", request: SimpleNamespace) -> None:
        self._llm = llm
        self._requested = request
        self._steps = self._emit()
        self.cached_tokens = 0
        self.outputs: list[Any] = []
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._steps

    async def _emit(self) -> AsyncIterator[Any]:
        request, llm = self._requested, self._llm
        prompt, given = request.inputs, request.disaggregated
        one = scripted.CompletionOutput(0)
        self.outputs = [one]
        if given is not None and given.request_type == "generation_only" and given.opaque_state != echo.digest(prompt):
            raise scripted.RequestError("another prompt's blocks")
        self.cached_tokens, parent, names, tokens = llm.held.add(prompt)
        llm.publish(parent, names, tokens)
        for token in echo.answer(prompt, request.params.max_tokens):
            await asyncio.sleep(echo.STEP_S)
            if self.is_aborted:
                echo.note("aborted", str(len(one.token_ids)))
                one.finish_reason = "cancelled"
                yield self
                return
            one.token_ids.append(token)
            if request.streaming and len(one.token_ids) < request.params.max_tokens:
                yield copy.copy(self)
        one.finish_reason = "length"
        if given is not None and given.request_type == "context_only":
            one.disaggregated_params = scripted.DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=list(one.token_ids),
                ctx_request_id=given.disagg_request_id,
                opaque_state=echo.digest(prompt),
            )
        elif given is not None:
            echo.note("fetched", str(given.ctx_request_id))
        yield self


class LLM(scripted.LLM):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.args.max_seq_len = self.args.max_seq_len or 4096
        self.held = echo.Held(kwargs["kv_cache_config"]["tokens_per_block"])
        self._child = echo.start_child()
        self._number = 0

    def answer(self, request: SimpleNamespace) -> Any:
        return Result(self, request)

    def publish(self, parent: int | None, names: list[int], tokens: list[int]) -> None:
        if not names:
            return
        size = self.held.block_tokens
        blocks = [
            {
                "type": "stored_block",
                "block_hash": name,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in tokens[at * size : (at + 1) * size]
                ],
                "cache_level": 0,
                "priority": 35,
            }
            for at, name in enumerate(names)
        ]
        data = {"type": "stored", "parent_hash": parent, "blocks": blocks}
        self.events.append({"event_id": self._number, "data": data, "window_size": 4096})
        self._number += 1

    def get_kv_cache_capacity(self) -> dict[str, int]:
        return {"maxNumBlocks": 4096, "tokensPerBlock": self.held.block_tokens, "maxNumTokens": 65536}

    def _check_health(self) -> bool:
        return os.path.exists(f"/proc/{self._child.pid}") and self._child.poll() is None

    def shutdown(self) -> None:
        super().shutdown()
        echo.stop_child(self._child)
