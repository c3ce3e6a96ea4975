"""A request becomes tokens and options, all of which are set."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from msgspec import UNSET

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.model_card.card import ModelFiles, build_card
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.protocols.model_card import RuntimeConfig
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, decode_chat, decode_completion
from dynamo.text import preprocessor as module
from dynamo.text.chat_template.bounds import FULL, LONG, QUICK, Budget, OverBudget
from dynamo.text.preprocessor import GenerationDefaults, Preprocessor


def load(path: Path, context_length: int = 512, **runtime: Any) -> Preprocessor:
    card = build_card(
        str(path), "m", context_length=context_length, kv_cache_block_size=16, runtime_config=RuntimeConfig(**runtime)
    )
    return Preprocessor(ModelFiles.from_card(card), card)


@pytest.fixture(scope="module")
def preprocessor(model_dir: Path) -> Preprocessor:
    return load(model_dir)


def chat(content: str = "hi", **fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]} | fields
    return decode_chat(json.dumps(body).encode())


def completion(prompt: Any = "hi", **fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"model": "m", "prompt": prompt} | fields).encode())


def test_preprocessor_renders_and_tokenizes_a_chat(preprocessor: Preprocessor) -> None:
    request = preprocessor.chat(chat("hi"))
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.token_ids == preprocessor.tokenizer.encode_by_library(prompt)
    assert preprocessor.formatted_prompt(chat("hi")) == prompt
    assert (request.model, request.mdc_sum) == ("m", preprocessor.mdc_sum)


def test_preprocessor_uses_model_defaults_for_missing_fields(preprocessor: Preprocessor) -> None:
    silent = preprocessor.chat(chat()).sampling_options
    assert (silent.temperature, silent.top_k, silent.top_p, silent.repetition_penalty) == (0.6, 20, None, None)
    spoken = preprocessor.chat(chat(temperature=0, top_k=-1, top_p=0.5, min_p=0.1, seed=3)).sampling_options
    assert (spoken.temperature, spoken.top_k, spoken.top_p, spoken.min_p, spoken.seed) == (0, -1, 0.5, 0.1, 3)


def test_preprocessor_prefers_greedy_sampling_over_temperature(preprocessor: Preprocessor) -> None:
    assert preprocessor.chat(chat(temperature=1, nvext={"greed_sampling": True})).sampling_options.temperature == 0


def test_preprocessor_eos_ids_come_from_the_model(preprocessor: Preprocessor) -> None:
    tokenizer = preprocessor.tokenizer
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    request = preprocessor.chat(chat(stop_token_ids=[7]))
    assert (request.eos_token_ids, request.stop_conditions.stop_token_ids_hidden) == (eos, eos)
    assert request.stop_conditions.stop_token_ids == [7]


def test_preprocessor_ignore_eos_leaves_no_hidden_stop_ids(preprocessor: Preprocessor) -> None:
    request = preprocessor.chat(chat(ignore_eos=True, min_tokens=3))
    assert (request.eos_token_ids, request.stop_conditions.stop_token_ids_hidden) == ([], None)
    assert (request.stop_conditions.ignore_eos, request.stop_conditions.min_tokens) == (True, 3)


# ---- length limits ------------------------------------------------------------------------------------------------


def test_preprocessor_does_not_set_max_tokens_without_a_request_limit(preprocessor: Preprocessor) -> None:
    assert preprocessor.chat(chat()).stop_conditions.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 7}, 7), ({"max_completion_tokens": 2}, 2)],
)
def test_preprocessor_prefers_max_completion_tokens(
    preprocessor: Preprocessor, fields: dict[str, int], expected: int
) -> None:
    assert preprocessor.chat(chat(**fields)).stop_conditions.max_tokens == expected


def test_preprocessor_limits_max_tokens_to_the_context(preprocessor: Preprocessor) -> None:
    request = preprocessor.chat(chat(max_tokens=100_000))
    assert request.stop_conditions.max_tokens == 512 - len(request.token_ids)


def test_preprocessor_refuses_a_prompt_that_fills_the_context(preprocessor: Preprocessor) -> None:
    ids = [5] * 512
    message = "maximum context length is 512 tokens, but the prompt has 512 tokens"
    with pytest.raises(InvalidArgument, match=message) as refused:
        preprocessor.completion(completion(ids))
    assert refused.value.param == "prompt"
    assert preprocessor.completion(completion(ids[:511], max_tokens=9))[0].stop_conditions.max_tokens == 1
    with pytest.raises(InvalidArgument, match="maximum context length is 512") as refused:
        preprocessor.chat(chat("word " * 600))
    assert refused.value.param == "messages"


def test_preprocessor_uses_the_architecture_limit_without_a_published_one(model_dir: Path) -> None:
    assert load(model_dir, context_length=0).context_length == 512


def test_preprocessor_does_not_set_max_tokens_without_any_context_limit(model_dir: Path, tmp_path: Path) -> None:
    path = _copy(model_dir, tmp_path, **{"config.json": {"eos_token_id": 1}})
    preprocessor = load(path, context_length=0)
    assert preprocessor.chat(chat("word " * 600)).stop_conditions.max_tokens is None
    assert preprocessor.chat(chat(max_tokens=9)).stop_conditions.max_tokens == 9


# ---- other options ------------------------------------------------------------------------------------------------


def test_preprocessor_stop_strings_are_a_list_or_none(preprocessor: Preprocessor) -> None:
    assert preprocessor.chat(chat(stop="x")).stop_conditions.stop == ["x"]
    assert preprocessor.chat(chat(stop=["x", "y"])).stop_conditions.stop == ["x", "y"]
    assert preprocessor.chat(chat()).stop_conditions.stop is None


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_preprocessor_logprobs_are_a_number_of_alternatives(
    preprocessor: Preprocessor, fields: dict[str, Any], logprobs: int | None
) -> None:
    assert preprocessor.chat(chat(**fields)).output_options.logprobs == logprobs


def test_preprocessor_passes_on_logprobs_of_a_completion(preprocessor: Preprocessor) -> None:
    request = preprocessor.completion(completion(logprobs=2, skip_special_tokens=False))[0]
    assert (request.output_options.logprobs, request.output_options.skip_special_tokens) == (2, False)


def test_preprocessor_splits_a_batch_into_one_request_per_prompt(preprocessor: Preprocessor) -> None:
    encode = preprocessor.tokenizer.encode_by_library
    assert [r.token_ids for r in preprocessor.completion(completion(["a b", "c"]))] == [encode("a b"), encode("c")]
    assert [r.token_ids for r in preprocessor.completion(completion([[5, 6], [7]]))] == [[5, 6], [7]]
    assert [r.token_ids for r in preprocessor.completion(completion([5, 6]))] == [[5, 6]]


def test_preprocessor_adds_bos_to_a_completion_where_the_model_expects_it(model_dirs: dict[str, Path]) -> None:
    llama = load(model_dirs["llama"])
    bos = llama.tokenizer.token_to_id("<|endoftext|>")
    assert llama.completion(completion("hello"))[0].token_ids[0] == bos
    assert llama.chat(chat("hello")).token_ids[0] != bos


@pytest.mark.parametrize("prompt", [[1_000_000], [[5], [1_000_000]]])
def test_preprocessor_refuses_an_id_outside_the_vocabulary(preprocessor: Preprocessor, prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match="token id 1000000 is not in the vocabulary"):
        preprocessor.completion(completion(prompt))


def test_preprocessor_uses_token_data_instead_of_text(preprocessor: Preprocessor) -> None:
    for request in (
        preprocessor.chat(chat(nvext={"token_data": [5, 6]})),
        preprocessor.completion(completion(nvext={"token_data": [5, 6]}))[0],
    ):
        assert request.token_ids == [5, 6]
        assert request.extra_args == {"nvext": {"token_in": True}}


def test_preprocessor_refuses_empty_token_data(preprocessor: Preprocessor) -> None:
    with pytest.raises(InvalidArgument, match=r"nvext\.token_data must not be empty"):
        preprocessor.chat(chat(nvext={"token_data": []}))


def test_preprocessor_raw_prompt_skips_the_template(preprocessor: Preprocessor) -> None:
    request = preprocessor.chat(chat("<|im_start|>raw", nvext={"use_raw_prompt": True}))
    assert request.token_ids == preprocessor.tokenizer.encode_by_library("<|im_start|>raw")


def test_preprocessor_refuses_a_chat_for_a_model_without_template(model_dir: Path, tmp_path: Path) -> None:
    preprocessor = load(_copy(model_dir, tmp_path, **{"tokenizer_config.json": {}}))
    with pytest.raises(InvalidArgument, match="no chat template: use /v1/completions"):
        preprocessor.chat(chat())
    assert preprocessor.completion(completion())


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(("excluded", "expected"), [(True, "[]"), (False, "[1]")])
def test_preprocessor_hides_tools_when_no_call_is_allowed(
    model_dir: Path, tmp_path: Path, excluded: bool, expected: str
) -> None:
    template = "[{{ tools | length if tools else '' }}]"
    path = _copy(model_dir, tmp_path, **{"tokenizer_config.json": {"chat_template": template}})
    preprocessor = load(path, exclude_tools_when_tool_choice_none=excluded)
    assert preprocessor.formatted_prompt(chat(tools=[TOOL], tool_choice="none")) == expected
    assert preprocessor.formatted_prompt(chat(tools=[TOOL])) == "[1]"


def test_preprocessor_omits_the_generation_prompt_when_disabled(preprocessor: Preprocessor) -> None:
    assert preprocessor.formatted_prompt(chat(add_generation_prompt=False)).endswith("<|im_end|>\n")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    continued = preprocessor.formatted_prompt(chat(messages=turns, continue_final_message=True))
    assert continued.endswith("assistant\nThe answer")


def test_preprocessor_passes_logit_bias(preprocessor: Preprocessor) -> None:
    request = preprocessor.chat(chat(logit_bias={"5": -100}, allowed_token_ids=[5], detokenize=True))
    assert request.extra_args == {
        "sampling_options": {"logit_bias": {"5": -100.0}, "allowed_token_ids": [5], "detokenize": True}
    }
    assert preprocessor.chat(chat()).extra_args is UNSET


def test_preprocessor_copies_routing_constraints(preprocessor: Preprocessor) -> None:
    nvext = {
        "backend_instance_id": (1 << 64) - 1,
        "dp_rank": 1,
        "cache_salt": "inner",
        "agent_hints": {"priority": -3, "osl": 9, "strict_priority": 2},
        "annotations": ["token_ids"],
        "request_timestamp_ms": 5,
        "extra_fields": ["timing"],
    }
    request = preprocessor.chat(chat(nvext=nvext, cache_salt="outer"))
    assert request.routing == Routing(
        backend_instance_id=(1 << 64) - 1,
        dp_rank=1,
        cache_salt="inner",
        priority=-3,
        priority_jump=0.0,
        expected_output_tokens=9,
        strict_priority=2,
    )
    assert (request.annotations, request.request_timestamp_ms) == (["token_ids"], 5)
    assert request.extra_args == {"nvext": {"cache_salt": "inner", "extra_fields": ["timing"]}}


def test_preprocessor_request_without_constraints_has_no_routing(preprocessor: Preprocessor) -> None:
    assert preprocessor.chat(chat(nvext={"annotations": ["token_ids"]})).routing is None
    assert preprocessor.chat(chat(cache_salt="")).routing is None
    assert preprocessor.chat(chat(cache_salt="x")).routing == Routing(cache_salt="x")


# ---- on the loop or off it ----------------------------------------------------------------------------------------


def _thread_of(monkeypatch: pytest.MonkeyPatch, preprocessor: Preprocessor) -> list[bool]:
    """Whether each request was prepared on this thread."""
    here: list[bool] = []
    prepare = Preprocessor._preprocessed

    def spy(self: Preprocessor, *args: Any, **kwargs: Any) -> PreprocessedRequest:
        here.append(threading.current_thread() is threading.main_thread())
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(Preprocessor, "_preprocessed", spy)
    return here


async def test_preprocessor_processes_long_prompts_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, preprocessor: Preprocessor
) -> None:
    monkeypatch.setattr(module, "THREAD_CHARS_MIN", 50)
    here = _thread_of(monkeypatch, preprocessor)
    short, long = "short", "word " * 20
    assert await preprocessor.chat_async(chat(short)) == preprocessor.chat(chat(short))
    assert await preprocessor.chat_async(chat(long)) == preprocessor.chat(chat(long))
    parts = [{"role": "user", "content": [{"type": "text", "text": long}]}]
    await preprocessor.chat_async(chat(messages=parts))
    await preprocessor.completion_async(completion(short))
    await preprocessor.completion_async(completion(long))
    await preprocessor.completion_async(completion([short, long]))
    await preprocessor.completion_async(completion([5] * 100))
    assert here == [True, True, False, True, False, True, False, False, False, True]


def test_preprocessor_counts_tools_and_calls_as_text() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "x" * 1000}}
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "tool_calls": [call]}]
    assert module.size_of(chat(messages=turns)) == 1003
    assert module.size_of(chat("abc", tools=[TOOL] * 20)) > 8192


async def test_preprocessor_raises_the_same_error_from_a_thread(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path
) -> None:
    monkeypatch.setattr(module, "THREAD_CHARS_MIN", 50)
    with pytest.raises(InvalidArgument, match="maximum context length"):
        await load(model_dir, context_length=8).chat_async(chat("word " * 20))


# ---- generation_config.json ---------------------------------------------------------------------------------------


def _copy(model_dir: Path, tmp_path: Path, **changed: Any) -> Path:
    for path in model_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, content in changed.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def _defaults(tmp_path: Path, config: Any, generation: Any) -> GenerationDefaults:
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = None
    if generation is not None:
        path = tmp_path / "generation_config.json"
        path.write_text(json.dumps(generation))
    files = ModelFiles(config=str(tmp_path / "config.json"), tokenizer="", generation_config=path and str(path))
    return GenerationDefaults.from_files(files)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [2, 3]}, (2, 3)),
        ({"eos_token_id": 1}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 1}, {}, (1,)),
        ({"eos_token_id": [1, 4]}, None, (1, 4)),
        ({"text_config": {"eos_token_id": 5}}, None, (5,)),
        ({}, None, ()),
    ],
)
def test_preprocessor_eos_ids_prefer_the_generation_config(
    tmp_path: Path, config: Any, generation: Any, ids: tuple[int, ...]
) -> None:
    assert _defaults(tmp_path, config, generation).eos_token_ids == ids


def test_preprocessor_generation_config_error_names_file_and_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*temperature"):
        _defaults(tmp_path, {}, {"temperature": "hot"})


# ---- suffixes -------------------------------------------------------------------------------------------------------

FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")


@pytest.fixture(scope="module")
def filling(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Preprocessor:
    """A model with fill-in-the-middle tokens."""
    path = tmp_path_factory.mktemp("fim")
    for file in model_dir.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in FIM])
    library.save(str(path / "tokenizer.json"))
    return load(path)


def test_completion_with_a_suffix_uses_the_models_format(filling: Preprocessor) -> None:
    tokenizer = filling.tokenizer
    (made,) = filling.completion(completion("def f(", suffix="return 1"))
    prefix, middle, suffix, pad = (tokenizer.token_to_id(text) for text in FIM)
    assert made.token_ids == [prefix, *tokenizer.encode("def f("), suffix, *tokenizer.encode("return 1"), middle]
    assert {prefix, middle, suffix, pad} <= set(made.eos_token_ids)
    assert made.stop_conditions.stop_token_ids_hidden == made.eos_token_ids


def test_completion_with_a_suffix_accepts_several_prompts_and_token_ids(filling: Preprocessor) -> None:
    texts = filling.completion(completion(["a", "b"], suffix="c"))
    ids = filling.completion(completion([5, 6], suffix="c", ignore_eos=True))
    assert len(texts) == 2 and texts[0].token_ids != texts[1].token_ids
    assert ids[0].token_ids[1:3] == [5, 6]
    assert ids[0].eos_token_ids == []


def test_completion_with_an_empty_suffix_is_a_plain_one(preprocessor: Preprocessor) -> None:
    assert preprocessor.completion(completion("hi", suffix=""))[0].token_ids == preprocessor.tokenizer.encode("hi")


def test_completion_with_a_suffix_is_refused_for_models_without_markers(preprocessor: Preprocessor) -> None:
    with pytest.raises(InvalidArgument, match="suffix is not supported by model `m`") as raised:
        preprocessor.completion(completion("hi", suffix="x"))
    assert raised.value.param == "suffix"


def test_completion_with_a_suffix_refuses_token_data_and_echo(filling: Preprocessor) -> None:
    with pytest.raises(InvalidArgument, match="are mutually exclusive"):
        filling.completion(completion("hi", suffix="x", nvext={"token_data": [1]}))
    with pytest.raises(InvalidArgument, match="echo and suffix"):
        completion("hi", suffix="x", echo=True)


async def test_request_with_long_body_is_prepared_in_thread(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    prepare = Preprocessor.chat

    def watched(self: Preprocessor, *args: Any) -> PreprocessedRequest:
        threads.append(threading.current_thread().name)
        return prepare(self, *args)

    monkeypatch.setattr(Preprocessor, "chat", watched)
    await preprocessor.chat_async(chat("hi"), body_bytes=100)
    await preprocessor.chat_async(chat("hi"), body_bytes=1 << 20)
    assert threads[0] == threading.current_thread().name != threads[1]


async def test_very_long_prompts_and_long_constraints_are_prepared_one_at_a_time(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[str, int]] = []

    async def at_once(work: Any, name: str, threads: int) -> Any:
        pools.append((name, threads))
        return work()

    monkeypatch.setattr(module, "in_few_threads", at_once)
    for size in (module.VERY_LONG_BYTES, module.VERY_LONG_BYTES + 1):
        await preprocessor.chat_async(chat("hi"), body_bytes=size)
        await preprocessor.completion_async(completion("hi"), body_bytes=size)
    for size in (10, 10_000):
        schema = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * size}}}
        body = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        await preprocessor.chat_async(chat("hi", response_format=body), body_bytes=module.THREAD_BODY_BYTES)
    shared, alone = (module.POOL, module.THREADS), (module.SINGLE_POOL, 1)
    assert pools == [shared, shared, alone, alone, shared, alone]


async def test_template_over_its_budget_is_rendered_again_with_a_larger_budget(preprocessor: Preprocessor) -> None:
    seen: list[tuple[Budget, bool]] = []

    def work(budget: Budget) -> str:
        seen.append((budget, threading.current_thread() is threading.main_thread()))
        if budget is not FULL:
            raise OverBudget
        return "done"

    assert await preprocessor.rendered(chat("hi"), 0, work) == "done"
    assert await preprocessor.rendered(chat("word " * 5000), 0, work) == "done"
    assert seen == [(QUICK, True), (FULL, False), (LONG, False), (FULL, False)]


def test_text_longer_than_the_context_is_refused_before_tokenization(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocessor.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    long = "x" * 512 * 200
    with pytest.raises(InvalidArgument, match="maximum context length is 512 tokens, but the prompt has 102"):
        preprocessor.chat(chat(long))
    with pytest.raises(InvalidArgument, match="Please reduce the length of the prompt") as refused:
        preprocessor.completion(completion(long))
    assert refused.value.param == "prompt"
