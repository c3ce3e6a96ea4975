"""Native response formats: an engine's tokens in the formats of vLLM's and SGLang's own APIs."""

from typing import Any

from dynamo.core.codec import json_encode
from dynamo.core.errors import Unknown
from dynamo.protocols.engine import CompletionUsage, EngineOutput, TopLogprob
from dynamo.protocols.native import (
    NativeLogprob,
    NativeLogprobs,
    VllmChoice,
    VllmLogprobs,
    VllmResponse,
    VllmStreamChoice,
    VllmStreamResponse,
)
from dynamo.serving.errors import ErrorAnswer, reason
from dynamo.serving.postprocessor import DONE
from dynamo.serving.response_form import Form, Whole, converted

ERROR = "error"
REASONS = {"eos": "stop"}
TYPES = {
    400: "invalid_request_error",
    404: "not_found",
    501: "not_implemented",
    503: "service_unavailable",
    504: "timeout_error",
    529: "overloaded",
}


class VllmForm(Form):
    """Whole response of vLLM's `/inference/v1/generate`: all tokens of all choices."""

    def __init__(self, prompt_tokens: int, request_id: str | None, *, wants_logprobs: bool = False) -> None:
        self._wants_logprobs = wants_logprobs
        self.request_id = request_id or ""
        """Request id; set when the request has one."""
        self._choices: dict[int, VllmChoice] = {}
        self._prompt_logprobs: Any = None
        self._kv_transfer_params: Any = None
        self.usage = CompletionUsage(prompt_tokens, 0, prompt_tokens)

    def token(self, token_id: int) -> bytes:
        self.tokens += 1
        self._choice(0).token_ids.append(token_id)
        return b""

    def add(self, value: Any) -> bytes:
        output: EngineOutput = converted(value, EngineOutput)
        self.tokens += len(output.token_ids)
        choice = self._choice(output.index or 0)
        choice.token_ids += output.token_ids
        if output.log_probs is not None and self._wants_logprobs:
            if choice.logprobs is None:
                choice.logprobs = VllmLogprobs([])
            choice.logprobs.content += logprobs_of(output)
        data = output.engine_data or {}
        self._prompt_logprobs = data.get("prompt_logprobs", self._prompt_logprobs)
        self._kv_transfer_params = data.get("kv_transfer_params", self._kv_transfer_params)
        choice.routed_experts = data.get("routed_experts", choice.routed_experts)
        choice.sampling_mask = data.get("sampling_mask", choice.sampling_mask)
        if output.finish_reason is not None:
            choice.finish_reason = finish_of(output.finish_reason)
        if output.completion_usage is not None:
            self.usage = output.completion_usage
        return b""

    def _choice(self, index: int) -> VllmChoice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = VllmChoice(index=index, token_ids=[])
        return choice

    def end(self) -> Whole:
        choices = [self._choices[index] for index in sorted(self._choices)]
        if not choices or any(one.finish_reason is None for one in choices):
            raise Unknown("the worker ended its stream without a finish reason")
        assert self.usage is not None, "set by __init__"
        if not self.usage.completion_tokens:
            self.usage = CompletionUsage(self.usage.prompt_tokens, self.tokens, self.usage.prompt_tokens + self.tokens)
        response = VllmResponse(
            request_id=self.request_id,
            choices=choices,
            prompt_logprobs=self._prompt_logprobs,
            kv_transfer_params=self._kv_transfer_params,
        )
        return Whole(json_encode(response))


class VllmStreamForm(Form):
    """Streamed response of vLLM's API: tokens of all choices as server-sent events."""

    def __init__(
        self, prompt_tokens: int, request_id: str | None, *, wants_logprobs: bool, total: bool, running: bool
    ) -> None:
        """`total` adds an event with the usage at the end; `running` adds the usage so far to every event."""
        self.request_id = request_id or ""
        self.usage = CompletionUsage(prompt_tokens, 0, prompt_tokens)
        self._prompt_tokens = prompt_tokens
        self._wants_logprobs = wants_logprobs
        self._total, self._running = total, running
        self._unfinished: set[int] = set()
        """Choices with tokens and without a finish reason."""
        self._has_choices = False

    def token(self, token_id: int) -> bytes:
        self._count(1)
        self._has_choices = True
        self._unfinished.add(0)
        return self._event([VllmStreamChoice(index=0, token_ids=[token_id])])

    def add(self, value: Any) -> bytes:
        output: EngineOutput = converted(value, EngineOutput)
        self._count(len(output.token_ids))
        if output.completion_usage is not None:
            self.usage = output.completion_usage
        index, self._has_choices = output.index or 0, True
        choice = VllmStreamChoice(index=index, token_ids=output.token_ids)
        if output.log_probs is not None and self._wants_logprobs:
            choice.logprobs = VllmLogprobs(logprobs_of(output))
        if output.finish_reason is None:
            self._unfinished.add(index)
        else:
            choice.finish_reason = finish_of(output.finish_reason)
            self._unfinished.discard(index)
        choice.routed_experts = (output.engine_data or {}).get("routed_experts")
        return self._event([choice])

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        self.usage = CompletionUsage(self._prompt_tokens, self.tokens, self._prompt_tokens + self.tokens)

    def _event(self, choices: list[VllmStreamChoice], *, with_usage: bool = False) -> bytes:
        usage = self.usage if with_usage or self._running else None
        body = VllmStreamResponse(request_id=self.request_id, choices=choices, usage=usage)
        return b"data: " + json_encode(body) + b"\n\n"

    def end(self) -> bytes:
        if not self._has_choices or self._unfinished:
            raise Unknown("the worker ended its stream without a finish reason")
        return (self._event([], with_usage=True) if self._total else b"") + DONE

    def failure(self, error: ErrorAnswer) -> bytes:
        """Return the error event of a failed stream."""
        return b"data: " + vllm_error(error) + b"\n\n" + DONE


class SglangStreamForm(Form):
    """Streamed response of `/generate`: the engine's own frames, or frames of the same format built from its tokens."""

    def __init__(self, prompt_tokens: int, request_id: str | None) -> None:
        self.request_id = request_id or ""
        self._prompt_tokens = prompt_tokens
        self._spoken: dict[int, int] = {}
        self.usage = CompletionUsage(prompt_tokens, 0, prompt_tokens)

    def token(self, token_id: int) -> bytes:
        return self._frame(0, [token_id], None)

    def add(self, value: Any) -> bytes:
        output: EngineOutput = converted(value, EngineOutput)
        self._count(output.index or 0, len(output.token_ids))
        own = (output.engine_data or {}).get("sglang_response")
        if own is not None:
            return b"data: " + json_encode(own) + b"\n\n"
        finish = None if output.finish_reason is None else {"type": finish_of(output.finish_reason)}
        return self._frame(output.index or 0, output.token_ids, finish, counted=True)

    def _count(self, index: int, tokens: int) -> None:
        self._spoken[index] = self._spoken.get(index, 0) + tokens
        self.tokens += tokens
        self.usage = CompletionUsage(self._prompt_tokens, self.tokens, self._prompt_tokens + self.tokens)

    def _frame(
        self, index: int, token_ids: list[int], finish: dict[str, str] | None, *, counted: bool = False
    ) -> bytes:
        if not counted:
            self._count(index, len(token_ids))
        meta = {
            "id": self.request_id,
            "finish_reason": finish,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._spoken[index],
        }
        frame: dict[str, Any] = {"output_ids": token_ids, "meta_info": meta}
        if len(self._spoken) > 1 or index:
            frame["index"] = index
        return b"data: " + json_encode(frame) + b"\n\n"

    def end(self) -> bytes:
        if not self._spoken:
            raise Unknown("the worker ended its stream without a token")
        return DONE

    def failure(self, error: ErrorAnswer) -> bytes:
        """Return the error in the format of SGLang's API."""
        return b"data: " + json_encode({"error": {"message": error.message}}) + b"\n\n" + DONE


class SglangWholeForm(Form):
    """Whole response of `/generate`: an object, or a list of them for several choices."""

    def __init__(self, prompt_tokens: int, request_id: str | None) -> None:
        self.request_id = request_id or ""
        self.usage = CompletionUsage(prompt_tokens, 0, prompt_tokens)
        self._prompt_tokens = prompt_tokens
        self._choices: dict[int, dict[str, Any]] = {}

    def token(self, token_id: int) -> bytes:
        return self.add({"token_ids": [token_id], "index": 0})

    def add(self, value: Any) -> bytes:
        output: EngineOutput = converted(value, EngineOutput)
        own = (output.engine_data or {}).get("sglang_response")
        index = output.index or 0
        if isinstance(own, dict):
            index = own["index"] if isinstance(own.get("index"), int) else index
            self._choices[index] = merged(self._choices.get(index), own)
        else:
            meta = self._meta(index, output)
            self._choices[index] = merged(self._choices.get(index), {"output_ids": output.token_ids, "meta_info": meta})
        self.tokens += len(output.token_ids)
        self.usage = CompletionUsage(self._prompt_tokens, self.tokens, self._prompt_tokens + self.tokens)
        return b""

    def _meta(self, index: int, output: EngineOutput) -> dict[str, Any]:
        """Return the `meta_info` of an output from an engine without frames of its own."""
        known = self._choices.get(index)
        count = (len(known["output_ids"]) if known else 0) + len(output.token_ids)
        meta: dict[str, Any] = {
            "id": self.request_id,
            "finish_reason": None if output.finish_reason is None else {"type": finish_of(output.finish_reason)},
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": count,
        }
        if output.log_probs is not None:
            pairs = zip(output.log_probs, output.token_ids, strict=False)
            meta["output_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in pairs]
        return meta

    def end(self) -> Whole:
        choices = [self._choices[index] for index in sorted(self._choices)]
        if not choices or any(not one["meta_info"].get("finish_reason") for one in choices):
            raise Unknown("the worker ended its stream without a finish reason")
        for one in choices:
            one.pop("index", None)
        return Whole(json_encode(choices if len(choices) > 1 else choices[0]))


def merged(known: dict[str, Any] | None, frame: dict[str, Any]) -> dict[str, Any]:
    """Return the response merged with one more frame; a frame holds either all output so far or only new output.

    SGLang sends either, depending on its version and options; `meta_info.completion_tokens` distinguishes them.
    """
    ids, meta = frame.get("output_ids"), frame.get("meta_info")
    if not isinstance(ids, list) or not isinstance(meta, dict):
        raise Unknown("a frame of the worker has no output_ids or no meta_info")
    if known is None or len(ids) == meta.get("completion_tokens"):
        return {**frame}
    before = known["meta_info"]
    meta = dict(meta)
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        old, new = before.get(name), meta.get(name)
        if isinstance(old, list) and (new is None or (isinstance(new, list) and len(new) <= len(ids))):
            meta[name] = old + (new or [])
    for name in ("input_token_logprobs", "input_top_logprobs"):
        if meta.get(name) is None and before.get(name) is not None:
            meta[name] = before[name]
    whole = {**known, **frame, "output_ids": known["output_ids"] + ids, "meta_info": meta}
    if isinstance(frame.get("text"), str) and isinstance(known.get("text"), str):
        whole["text"] = known["text"] + frame["text"]
    return whole


def finish_of(reason: str) -> str:
    """Return the native finish reason. Raise `Unknown` for an error."""
    if reason.startswith(ERROR):
        raise Unknown(reason)
    return REASONS.get(reason, reason)


def logprobs_of(output: EngineOutput) -> list[NativeLogprobs]:
    """Return the logprobs of the tokens of one output."""
    found: list[NativeLogprobs] = []
    for place, (token_id, logprob) in enumerate(zip(output.token_ids, output.log_probs or (), strict=False)):
        others: list[TopLogprob] = []
        if output.top_logprobs is not None and place < len(output.top_logprobs):
            others = output.top_logprobs[place]
        word = f"token_id:{token_id}"
        found.append(
            NativeLogprobs(
                token=word,
                logprob=logprob,
                bytes=list(word.encode()),
                top_logprobs=[_alternative(one) for one in others],
            )
        )
    return found


def _alternative(one: TopLogprob) -> NativeLogprob:
    word = f"token_id:{one.token_id}"
    return NativeLogprob(token=word, logprob=one.logprob, bytes=list(word.encode()))


def vllm_error(error: ErrorAnswer) -> bytes:
    """Return an error of `/inference/v1/generate`, including the flat keys of every error."""
    kind = TYPES.get(error.status, "internal_error" if error.status >= 500 else "invalid_request_error")
    message = "internal server error" if error.status == 500 else error.message
    nested = {"message": message, "type": kind, "code": error.status}
    return json_encode({"error": nested, "message": message, "type": reason(error.status), "code": error.status})


def sglang_error(error: ErrorAnswer) -> bytes:
    """Return an error of `/generate`."""
    flat = {"message": error.message, "type": reason(error.status), "param": error.param, "code": error.status}
    return json_encode({"object": "error", **flat, "error": {"message": error.message}})
