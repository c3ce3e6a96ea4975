"""Preprocessor: conversion of an OpenAI request into tokens and options for a worker.

Options that the request omits are filled here, once: sampling from the model's generation config, end-of-sequence ids
from the model. Only a missing `max_tokens` stays unset: each engine has its own default, the rest of the context or,
for the mocker, an error.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.slices import slices
from dynamo.core.threads import in_daemon_thread, in_few_threads
from dynamo.model_card.card import DEFAULT_MODE_KEY, DISABLED, ENABLED, ModelFiles, mdc_sum, read_json
from dynamo.protocols.engine import OutputOptions, PreprocessedRequest, SamplingOptions, StopConditions
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.protocols.openai import ChatCompletionRequest, CommonRequest, CompletionRequest
from dynamo.text.answer_parsers import Readers
from dynamo.text.chat_template.bounds import FULL, LONG, QUICK, Budget, OverBudget
from dynamo.text.chat_template.template import ChatTemplate
from dynamo.text.chat_template.turns import template_arguments, thinking_mode
from dynamo.text.fill_in_middle import FillInMiddle
from dynamo.text.guided import form_bytes, guided_decoding
from dynamo.text.multimodal.media import has_media, media_of, shown_messages
from dynamo.text.multimodal.routing_hashes import ImageRouting, image_routing
from dynamo.text.preparing import THREAD_CHARS_MIN, Timings, routing_of
from dynamo.text.tokenizer.prefix_tokens import TooManyTokens
from dynamo.text.tokenizer.tokenizer import BACKENDS, Tokenizer

T = TypeVar("T")

POOL, THREADS = "prompt", 3
"""Threads that prepare long prompts: tokenizers run without the interpreter lock, but templates hold it."""
SINGLE_POOL, VERY_LONG_BYTES = "very long prompt", 2 << 20
"""Thread of longer prompts, one at a time: each copy of a text of 15 MB holds the lock for some 10 ms. The same for long constraints: a
schema is checked in Python, and several such threads would each delay the event loop by a switch interval."""
THREAD_BODY_BYTES = 64 << 10  # A body of this size holds tools, media or ids, which `size_of` does not count.
SHORT_TOKEN_CHARS = 16  # A text with fewer characters per token of the context is tokenized without a length check.
TOKEN_CHARS_MIN = 128  # Vocabularies have tokens of this many spaces; a normalizer may remove more.
TOOL_CHARS = 500  # Rough size of a tool's description in a prompt; an exact count would require writing its JSON.


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults from a model's generation_config.json for requests that omit them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_files(cls, files: ModelFiles) -> "GenerationDefaults":
        """Read the defaults. Raise `ConfigError` that names the file and the field."""
        config = read_json(files.config)
        generation = read_json(files.generation_config) if files.generation_config else {}
        path = files.generation_config or files.config
        eos = generation.get("eos_token_id")
        if eos is None:
            text_config = config.get("text_config")
            nested = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
            eos = config.get("eos_token_id", nested)
        fields = {name: generation[name] for name in _SAMPLING_DEFAULTS if generation.get(name) is not None}
        try:
            return msgspec.convert({**fields, "eos_token_ids": _id_list(eos)}, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {error}") from None


_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Preprocessor:
    """Preprocessor of requests for one model."""

    def __init__(
        self, files: ModelFiles, card: ModelDeploymentCard, tokenizers: Sequence[str] = tuple(BACKENDS)
    ) -> None:
        """Read the model's files, which blocks for up to a second. Raise `ConfigError`."""
        self.tokenizer = Tokenizer.from_files(files, tokenizers)
        self.template = ChatTemplate.from_files(files)
        self.defaults = GenerationDefaults.from_files(files)
        self.mdc_sum = mdc_sum(card)
        self.context_length = _context_length(card)
        """Maximum of prompt and output together, in tokens; 0 if unknown."""
        self.tokenizer.tokens_max = max(self.tokenizer.tokens_max, self.context_length)
        self.timings: Timings | None = None
        """Observer of the duration of preparing a chat."""
        self.readers = Readers(card.runtime_config, self.tokenizer)
        """Answer parsers of the model."""
        self._files, self._card = files, card
        self._config = card.runtime_config
        mode = card.runtime_config.runtime_data.get(DEFAULT_MODE_KEY)
        self._thinking_mode = mode if mode in (ENABLED, DISABLED) else None
        self._lora = card.lora.get("name") if isinstance(card.lora, dict) else None
        self._shows_tools_when_none = not card.runtime_config.exclude_tools_when_tool_choice_none

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """The model's format for a completion with a suffix; None if its tokenizer has no markers for one."""
        return FillInMiddle.find(self.tokenizer.markers())

    @cached_property
    def images(self) -> ImageRouting | None:
        """Image routing of the model; loaded for the first prompt with images."""
        source = self._card.source_path
        return image_routing(self._files, source if isinstance(source, str) else None, self._card.display_name)

    def chat(self, request: ChatCompletionRequest, budget: Budget = FULL) -> PreprocessedRequest:
        """Return a chat in tokens. Raise `InvalidArgument`, and `OverBudget` if the template exceeds the budget."""
        nvext = request.nvext
        text: str | None = None
        if nvext is not None and nvext.token_data is not None:
            token_ids = self._checked(nvext.token_data, "nvext.token_data")
        else:
            began_s = time.perf_counter()
            text = self.formatted_prompt(request, budget)
            self._check_length(text, "messages")
            rendered_s = time.perf_counter()
            token_ids = self._encoded(text, "messages", special=False)
            self._report_timings(rendered_s - began_s, time.perf_counter() - rendered_s)
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        output = OutputOptions(
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            skip_special_tokens=request.skip_special_tokens,
            return_tokens_as_token_ids=request.return_tokens_as_token_ids,
        )
        prepared = self._preprocessed(request, token_ids, output, max_tokens=limit, param="messages")
        self._add_thinking(request, prepared)
        if request.mm_processor_kwargs is not None:
            prepared.mm_processor_kwargs = request.mm_processor_kwargs
        if request.media_io_kwargs is not None:
            prepared.media_io_kwargs = request.media_io_kwargs
        if has_media(request.messages):
            self._add_media(request, prepared, text)
        return prepared

    def _add_thinking(self, request: ChatCompletionRequest, prepared: PreprocessedRequest) -> None:
        """Set the reasoning budget and, if reasoning is parsed, the template arguments of the reasoning parser."""
        budget = request.thinking_token_budget
        if budget is not None:
            prepared.stop_conditions.max_thinking_tokens = budget
        if not self.readers.finds_thoughts:
            return
        arguments = template_arguments(request, self._thinking_mode)
        if arguments:
            _extra(prepared)["reasoning_parser_kwargs"] = {"chat_template_kwargs": arguments}
        is_bounded = prepared.stop_conditions.max_thinking_tokens is not None
        if not is_bounded and not is_constrained(request):
            return
        if (thinking_mode(request) or self._thinking_mode) != DISABLED and not self.readers.is_past_thoughts(prepared):
            prepared.require_reasoning = True

    def _add_media(self, request: ChatCompletionRequest, prepared: PreprocessedRequest, text: str | None) -> None:
        """Add the media, and the messages and prompt for workers that locate media in the conversation."""
        prepared.multi_modal_data = media_of(request.messages)
        extra = _extra(prepared)
        extra["messages"] = shown_messages(request.messages)
        if text is not None:
            extra["formatted_prompt"] = text

    def _report_timings(self, template_s: float, tokenize_s: float) -> None:
        """Report durations on the observer's thread."""
        if self.timings is None:
            return
        if threading.get_ident() == self.timings.thread:
            self.timings.observe(template_s, tokenize_s)
        else:
            self.timings.loop.call_soon_threadsafe(self.timings.observe, template_s, tokenize_s)

    def completion(self, request: CompletionRequest) -> list[PreprocessedRequest]:
        """Return a text completion in tokens, one request per prompt. Raise `InvalidArgument`."""
        wants_echoed_logprobs = request.echo and request.logprobs is not None
        requested = [
            one
            for one in (request.logprobs if wants_echoed_logprobs else None, request.prompt_logprobs)
            if one is not None
        ]
        best_of = request.best_of if (request.best_of or 1) > (request.n or 1) else None
        output = OutputOptions(
            # `best_of` ranks by token probability, so logprobs are needed if more choices are generated than returned.
            logprobs=0 if request.logprobs is None and best_of is not None else request.logprobs,
            prompt_logprobs=max(requested, default=None),
            skip_special_tokens=request.skip_special_tokens,
            return_tokens_as_token_ids=request.return_tokens_as_token_ids,
            no_stop_trim=True if request.no_stop_trim else UNSET,
        )
        made: list[PreprocessedRequest] = []
        middle = self._middle(request) if request.suffix else None
        if request.prompt_embeds is not None:
            prompts: Sequence[list[int]] = [[]]
        else:
            prompts = self._prompts(request) if middle is None else self._middle_prompts(request, middle)
        for token_ids in prompts:
            prepared = self._preprocessed(request, token_ids, output, max_tokens=request.max_tokens, param="prompt")
            if request.prompt_embeds is not None:
                prepared.prompt_embeds = request.prompt_embeds
            if middle is not None and not request.ignore_eos:
                prepared.eos_token_ids = list(dict.fromkeys([*prepared.eos_token_ids, *middle.end_ids]))
                prepared.stop_conditions.stop_token_ids_hidden = prepared.eos_token_ids or None
            if best_of is not None:
                prepared.sampling_options.n = prepared.sampling_options.best_of = best_of
            elif request.best_of is not None:
                prepared.sampling_options.best_of = request.best_of
            if request.is_echo_alone:
                _generate_least(prepared)
            made.append(prepared)
        return made

    async def chat_async(self, request: ChatCompletionRequest, body_bytes: int = 0) -> PreprocessedRequest:
        """Run `chat`, in a thread if the conversation or the request's body is long; a short one does not suspend."""
        return await self.rendered(request, body_bytes, partial(self.chat, request))

    async def rendered(self, request: ChatCompletionRequest, body_bytes: int, work: Callable[[Budget], T]) -> T:
        """Return the result of `work` on a chat's prompt, with the smallest budget that its template needs."""
        size = body_bytes if body_bytes >= THREAD_BODY_BYTES else size_of(request) + form_bytes(request)
        with contextlib.suppress(OverBudget):
            return work(QUICK) if size < THREAD_CHARS_MIN else await _in_thread(request, size, partial(work, LONG))
        # This may wait for a child process; the loop's thread pool is reserved for computation.
        return await in_daemon_thread(partial(work, FULL), "chat template")

    async def completion_async(self, request: CompletionRequest, body_bytes: int = 0) -> list[PreprocessedRequest]:
        """Run `completion`, in a thread if the prompts are long; short ones do not suspend."""
        prompt = request.prompt
        if body_bytes >= THREAD_BODY_BYTES:
            return await _in_thread(request, body_bytes, partial(self.completion, request))
        if isinstance(prompt, str):
            size = len(prompt)
        else:
            size = sum(len(part) for part in prompt or () if isinstance(part, str))
        size += len(request.suffix or "") + form_bytes(request)
        if size < THREAD_CHARS_MIN:
            return self.completion(request)
        return await _in_thread(request, size, partial(self.completion, request))

    def formatted_prompt(self, request: ChatCompletionRequest | CompletionRequest, budget: Budget = FULL) -> str:
        """Return the text that is tokenized, as in the annotation `formatted_prompt`. Raise as `chat`."""
        if isinstance(request, CompletionRequest):
            return request.prompt if isinstance(request.prompt, str) else ""
        if request.nvext is not None and request.nvext.use_raw_prompt:
            return "\n".join(message.content for message in request.messages if isinstance(message.content, str))
        if self.template is None:
            raise InvalidArgument("this model has no chat template: use /v1/completions", param="messages")
        is_continued = bool(request.continue_final_message)
        return self.template.render(
            request.messages,
            tools=None if request.tool_choice == "none" and not self._shows_tools_when_none else request.tools,
            add_generation_prompt=request.add_generation_prompt is not False and not is_continued,
            continue_final_message=is_continued,
            arguments=template_arguments(request, self._thinking_mode),
            budget=budget,
        )

    def _prompts(self, request: CompletionRequest) -> Sequence[list[int]]:
        if request.nvext is not None and request.nvext.token_data is not None:
            return [self._checked(request.nvext.token_data, "nvext.token_data")]
        prompt = request.prompt
        for text in [prompt] if isinstance(prompt, str) else prompt or ():
            if isinstance(text, str):
                self._check_length(text, "prompt")
        if isinstance(prompt, str):
            return [self._encoded(prompt, "prompt")]
        assert prompt, "decoding rejects an empty prompt"
        if isinstance(prompt[0], int):
            return [self._checked(prompt, "prompt")]  # type: ignore[arg-type]
        return [
            self._encoded(part, "prompt") if isinstance(part, str) else self._checked(part, "prompt")  # type: ignore[arg-type]
            for part in prompt
        ]

    def _encoded(self, text: str, param: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a prompt. Raise `InvalidArgument` for too many."""
        try:
            return self.tokenizer.encode(text, add_special_tokens=special)
        except TooManyTokens as error:
            self._max_tokens(error.count, None, param)  # Usually the model's context is exceeded as well.
            raise

    def _middle(self, request: CompletionRequest) -> FillInMiddle:
        """Return the model's format. Raise `InvalidArgument` for an unsupported suffix."""
        middle = self.fill_in_middle
        if middle is None:
            raise InvalidArgument(
                f"Validation: suffix is not supported by model `{self._card.display_name}`: its tokenizer has no "
                "fill-in-the-middle tokens",
                param="suffix",
            )
        if request.nvext is not None and request.nvext.token_data is not None:
            raise InvalidArgument("Validation: suffix and nvext.token_data are mutually exclusive", param="suffix")
        return middle

    def _middle_prompts(self, request: CompletionRequest, middle: FillInMiddle) -> list[list[int]]:
        """Return the ids of each prompt with the suffix, between the model's markers."""
        prompt = request.prompt
        parts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        before, after = self.tokenizer.affixes()
        suffix = self.tokenizer.encode(request.suffix or "")
        made: list[list[int]] = []
        for part in parts or ():
            prefix = self.tokenizer.encode(part) if isinstance(part, str) else self._checked(part, "prompt")  # type: ignore[arg-type]
            made.append([*before, *middle.token_ids(prefix, suffix), *after])
        return made

    def _check_length(self, text: str, param: str) -> None:
        """Raise `InvalidArgument` for a text so long that its tokens cannot fit, before it is tokenized."""
        if not self.context_length or len(text) <= self.context_length * SHORT_TOKEN_CHARS:
            return
        most = self.context_length * self._token_chars
        if len(text) > most:
            raise InvalidArgument(
                f"This model's maximum context length is {self.context_length} tokens, but the prompt has {len(text)} "
                f"characters, and no more than {most} fit. Please reduce the length of the {param}.",
                param=param,
            )

    @cached_property
    def _token_chars(self) -> int:
        """Return the maximum number of characters of a token."""
        return max(TOKEN_CHARS_MIN, max(map(len, self.tokenizer.token_bytes()), default=0))

    def _checked(self, token_ids: list[int], param: str) -> list[int]:
        """Return ids that came from the client, after checking them."""
        if not token_ids:
            raise InvalidArgument(f"Validation: {param} must not be empty", param=param)
        self._max_tokens(len(token_ids), None, param)  # Before the ids are checked one by one.
        largest = max(map(max, slices(token_ids)))
        if largest >= self.tokenizer.vocab_size:
            raise InvalidArgument(
                f"Validation: {param}: token id {largest} is not in the vocabulary of "
                f"{self.tokenizer.vocab_size} tokens",
                param=param,
            )
        return token_ids

    def _preprocessed(
        self,
        request: CommonRequest,
        token_ids: list[int],
        output: OutputOptions,
        *,
        max_tokens: int | None,
        param: str,
    ) -> PreprocessedRequest:
        eos_token_ids = [] if request.ignore_eos else list(self.defaults.eos_token_ids)
        nvext = request.nvext
        stop_conditions = StopConditions(
            max_tokens=self._max_tokens(len(token_ids), max_tokens, param),
            stop=request.stop_strings,
            stop_token_ids=request.stop_token_ids,
            stop_token_ids_hidden=eos_token_ids or None,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            max_thinking_tokens=nvext.max_thinking_tokens if nvext is not None else None,
        )
        salt = (nvext.cache_salt if nvext is not None else None) or request.cache_salt or None
        return PreprocessedRequest(
            model=request.model,
            token_ids=token_ids,
            stop_conditions=stop_conditions,
            sampling_options=self._sampling(request, is_greedy=nvext is not None and bool(nvext.greed_sampling)),
            output_options=output,
            eos_token_ids=eos_token_ids,
            mdc_sum=self.mdc_sum,
            annotations=(nvext.annotations or []) if nvext is not None else [],
            routing=routing_of(nvext, salt, self._lora),
            extra_args=extra_args_of(request, salt) or UNSET,
            request_timestamp_ms=nvext.request_timestamp_ms
            if nvext is not None and nvext.request_timestamp_ms is not None
            else UNSET,
            router=nvext.router if nvext is not None and nvext.router is not None else UNSET,
        )

    def _max_tokens(self, prompt_tokens: int, requested: int | None, param: str) -> int | None:
        """Return the maximum tokens of the answer. Raise `InvalidArgument` if the prompt fills the context."""
        if not self.context_length:
            return requested
        left = self.context_length - prompt_tokens
        if left < 1:
            raise InvalidArgument(
                f"This model's maximum context length is {self.context_length} tokens, but the prompt has "
                f"{prompt_tokens} tokens. Please reduce the length of the {param}.",
                param=param,
            )
        return None if requested is None else min(requested, left)

    def _sampling(self, request: CommonRequest, is_greedy: bool) -> SamplingOptions:
        defaults = self.defaults
        return SamplingOptions(
            n=request.n,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
            temperature=0.0 if is_greedy else _or(request.temperature, defaults.temperature),
            top_p=_or(request.top_p, defaults.top_p),
            top_k=_or(request.top_k, defaults.top_k),
            min_p=_or(request.min_p, defaults.min_p),
            seed=request.seed,
            include_stop_str_in_output=request.include_stop_str_in_output,
            guided_decoding=guided_decoding(request, self._config),
        )


async def _in_thread(request: CommonRequest, size: int, work: Callable[[], T]) -> T:
    """Return the result of `work` on a request of that size, in bytes, computed in a thread for requests of its kind."""
    if size > VERY_LONG_BYTES or form_bytes(request) >= THREAD_CHARS_MIN:
        return await in_few_threads(work, SINGLE_POOL, 1)
    return await in_few_threads(work, POOL, THREADS)


def _generate_least(prepared: PreprocessedRequest) -> None:
    """Request one token, the minimum that engines generate; the frontend discards it."""
    prepared.stop_conditions.max_tokens = 1
    prepared.stop_conditions.min_tokens = None
    prepared.sampling_options.guided_decoding = None


def size_of(request: ChatCompletionRequest) -> int:
    """Return the approximate number of characters of the prompt."""
    size = TOOL_CHARS * len(request.tools or ())
    for message in request.messages:
        content = message.content
        size += len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content or ())
        for call in message.tool_calls or ():
            size += len(call.function.arguments) if isinstance(call.function.arguments, str) else TOOL_CHARS
    return size


def is_constrained(request: ChatCompletionRequest) -> bool:
    """Return whether the answer, without the reasoning before it, is constrained to a form."""
    form = request.response_format
    return (form is not None and form.type != "text") or request.tool_choice not in (None, "none", "auto")


def _extra(prepared: PreprocessedRequest) -> dict[str, Any]:
    if prepared.extra_args is UNSET:
        prepared.extra_args = {}
    return prepared.extra_args


def extra_args_of(request: CommonRequest, cache_salt: str | None = None) -> dict[str, Any]:
    """Return the request fields sent to the worker outside the typed fields."""
    extra: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    if request.logit_bias:
        sampling["logit_bias"] = {str(token_id): bias for token_id, bias in request.logit_bias.items()}
    if request.allowed_token_ids is not None:
        sampling["allowed_token_ids"] = request.allowed_token_ids
    if request.detokenize is not None:
        sampling["detokenize"] = request.detokenize
    if sampling:
        extra["sampling_options"] = sampling
    marks: dict[str, Any] = {}
    if cache_salt:
        marks["cache_salt"] = cache_salt
    nvext = request.nvext
    if nvext is not None:
        if nvext.token_data is not None:
            marks["token_in"] = True
        if nvext.extra_fields:
            marks["extra_fields"] = nvext.extra_fields
        if nvext.metadata_upload is not None:
            marks["metadata_upload"] = nvext.metadata_upload
    if marks:
        extra["nvext"] = marks
    return extra


def _context_length(card: ModelDeploymentCard) -> int:
    """Return the worker's limit; if it publishes none, the architecture's."""
    return card.context_length or card.runtime_config.context_length or card.architectural_max_context_length or 0


def _id_list(value: Any) -> Any:
    """Normalize `eos_token_id`, which is a number, a list of them or null."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _or(requested: Any, default: Any) -> Any:
    return default if requested is None else requested
