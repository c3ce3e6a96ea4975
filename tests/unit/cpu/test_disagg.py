"""Prefill and decode in two engines: the same tokens as in one, whatever is asked and whatever goes wrong."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import save_file
from tests.unit.cpu.conftest import CONFIG, Heard, random_tensors

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.engine import CpuEngine
from dynamo.protocols.engine import (
    BYPASS_REMOTE_PREFILL,
    EngineOutput,
    GuidedDecoding,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    Routing,
    SamplingOptions,
    StopConditions,
)
from dynamo.protocols.kv_events import Stored

TIMEOUT_S = 30.0
PROMPT = [(7 * place) % 90 for place in range(41)]


class Reply(Heard):
    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()
        self.began = asyncio.Event()

    def token(self, token_id: int) -> None:
        super().token(token_id)
        self.began.set()

    def item(self, value: Any) -> None:
        super().item(value)
        self.began.set()

    def finish(self) -> None:
        super().finish()
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.ended.set()

    async def end(self) -> None:
        await asyncio.wait_for(self.ended.wait(), TIMEOUT_S)

    @property
    def outputs(self) -> list[EngineOutput]:
        return [word for word in self.said if isinstance(word, EngineOutput)]

    def tokens_of(self, index: int) -> list[int]:
        return [
            token
            for word in self.said
            for token in ([word] if isinstance(word, int) else word.token_ids)
            if (0 if isinstance(word, int) else word.index) == index
        ]


class Host:
    def __init__(self) -> None:
        self.metrics = MetricsRegistry()
        self.worker_id = 1
        self.events: list[Any] = []
        self.loads: list[Any] = []

    def publish_kv_event(self, event: Any, dp_rank: int = 0, tier: Any = None) -> None:
        self.events.append(event)

    def publish_load(self, load: Any) -> None:
        self.loads.append(load)

    def publish_forward_pass(self, passed: Any, dp_rank: int = 0) -> None: ...

    def fail(self, error: BaseException) -> None:
        raise error

    async def leave_service(self) -> None: ...

    async def return_to_service(self) -> None: ...

    def number(self, name: str, **labels: str) -> float:
        """The sum of the series of that name with these labels."""
        lines = [line for line in self.metrics.render().splitlines() if line.startswith((name + "{", name + " "))]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(one in line for one in wanted))


class Side:
    """One engine and its host."""

    def __init__(self, engine: CpuEngine, host: Host) -> None:
        self.engine = engine
        self.host = host

    async def answer(self, request: PreprocessedRequest) -> Reply:
        reply = Reply()
        self.engine.submit(request, reply)
        await reply.end()
        assert reply.error is None, reply.error
        return reply

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, what
            await asyncio.sleep(0.01)

    @property
    def held(self) -> float:
        return self.host.number("dynamo_component_kv_held_blocks")

    @property
    def used(self) -> int:
        return self.engine._core.scheduler.pool.used

    async def is_clean(self) -> None:
        """Waits until nothing is held, and looks whether the books are in order."""
        await self.until(lambda: self.held == self.used == 0, "blocks are still held")
        self.engine._core.scheduler.validate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, write_letters: Callable[[Path], None]) -> str:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_tensors(CONFIG), path / "model.safetensors")
    write_letters(path)
    return str(path)


@pytest.fixture
async def begin(model: str) -> AsyncIterator[Callable[..., Any]]:
    started: list[CpuEngine] = []

    async def start(role: str = "agg", **options: Any) -> Side:
        host = Host()
        base: dict[str, Any] = {
            "model_path": model,
            "block_size": 4,
            "kv_transfer_host": "127.0.0.1",
            "kv_transfer": ["shm"],
        }
        engine = CpuEngine(CpuConfig(**(base | {"disaggregation_mode": role} | options)))
        started.append(engine)
        await engine.start(host)
        return Side(engine, host)

    yield start
    for engine in started:
        await engine.stop()


def ask(prompt: list[int] | None = None, *, max_tokens: int = 10, **options: Any) -> PreprocessedRequest:
    stop = {"max_tokens": max_tokens} | options.pop("stop", {})
    output = OutputOptions(logprobs=options.pop("logprobs", None))
    guided = options.pop("guided", None)
    salt = options.pop("salt", None)
    return PreprocessedRequest(
        model="m",
        token_ids=list(prompt or PROMPT),
        stop_conditions=StopConditions(**stop),
        sampling_options=SamplingOptions(guided_decoding=guided, **({"temperature": 0.0} | options)),
        output_options=output,
        eos_token_ids=[95],
        routing=Routing(cache_salt=salt) if salt else None,
    )


def prefill_leg(request: PreprocessedRequest) -> PreprocessedRequest:
    """As a frontend sends it."""
    return msgspec.structs.replace(
        request, stop_conditions=msgspec.structs.replace(request.stop_conditions, max_tokens=1)
    )


def decode_leg(request: PreprocessedRequest, params: dict[str, Any]) -> PreprocessedRequest:
    travelled = msgspec.json.decode(msgspec.json.encode(params))
    return msgspec.structs.replace(request, prefill_result=PrefillResult(travelled))


async def in_two(prefill: Side, decode: Side, request: PreprocessedRequest) -> Reply:
    first = await prefill.answer(prefill_leg(request))
    (output,) = first.outputs
    assert output.finish_reason == "length"
    assert output.disaggregated_params is not None
    return await decode.answer(decode_leg(request, output.disaggregated_params))


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 77},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 3},
    "no alternatives": {"logprobs": 0, "temperature": 0.8, "seed": 5},
    "choices": {"n": 3, "temperature": 1.0, "seed": 9},
    "choices with logprobs": {"n": 2, "temperature": 1.0, "seed": 9, "logprobs": 1},
    "guided": {"guided": GuidedDecoding(regex="[a-f]{3,20}z"), "temperature": 1.0, "seed": 4, "max_tokens": 30},
    "one token": {"max_tokens": 1},
    "a least length": {"stop": {"min_tokens": 9}, "temperature": 1.5, "seed": 1},
    "salted": {"salt": "tenant"},
    "a whole number of blocks": {"prompt": PROMPT[:40]},
    "one token of a prompt": {"prompt": [5]},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_two_engines_say_what_one_says(begin: Any, kind: str) -> None:
    whole, prefill, decode = await begin(), await begin("prefill"), await begin("decode")
    options = dict(KINDS[kind])
    request = ask(options.pop("prompt", None), **options)
    want = await whole.answer(request)
    got = await in_two(prefill, decode, request)
    for index in range(request.sampling_options.n or 1):
        assert got.tokens_of(index) == want.tokens_of(index)
    assert [one.finish_reason for one in got.outputs if one.finish_reason] == [
        one.finish_reason for one in want.outputs if one.finish_reason
    ]
    assert [
        one.log_probs and round(one.log_probs[0], 4) for one in sorted(got.outputs, key=lambda o: o.index or 0)
    ] == [one.log_probs and round(one.log_probs[0], 4) for one in sorted(want.outputs, key=lambda o: o.index or 0)]
    usage, expected = got.outputs[-1].completion_usage, want.outputs[-1].completion_usage
    assert usage is not None
    assert expected is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)
    await prefill.is_clean()
    await decode.is_clean()
    assert decode.host.number("dynamo_component_local_prefills_total") == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_blocks_move_by_the_way_that_is_open(begin: Any, transport: str) -> None:
    prefill, decode = await begin("prefill", kv_transfer=[transport]), await begin("decode", kv_transfer=["shm", "tcp"])
    await in_two(prefill, decode, ask())
    config: dict[str, Any] = CONFIG
    layers, heads, dim = config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]
    size = 11 * layers * 2 * heads * 4 * dim * 4
    await decode.until(
        lambda: decode.host.number("dynamo_component_kv_fetched_bytes_total", transport=transport) == size,
        "the blocks were not fetched so",
    )
    assert decode.host.number("dynamo_component_kv_fetches_total", outcome="ok") == 1


async def test_the_blocks_are_really_those_of_the_prefill_worker(begin: Any) -> None:
    """Another prompt's blocks make another answer: nothing is computed again in secret."""
    whole, prefill, decode = await begin(), await begin("prefill"), await begin("decode", enable_prefix_caching=False)
    other = [(11 * place + 3) % 90 for place in range(41)]
    params = [
        (await prefill.answer(prefill_leg(ask(prompt)))).outputs[0].disaggregated_params for prompt in (PROMPT, other)
    ]
    right, wrong = dict(params[0]), dict(params[0]) | {"kv": params[1]["kv"]}
    want = (await whole.answer(ask(max_tokens=20))).tokens
    assert (await decode.answer(decode_leg(ask(max_tokens=20), wrong))).tokens != want
    assert (await decode.answer(decode_leg(ask(max_tokens=20), right))).tokens == want


async def test_what_decode_has_is_not_fetched_again(begin: Any) -> None:
    prefill, decode = await begin("prefill"), await begin("decode")
    first = await in_two(prefill, decode, ask())
    bytes_of_one = decode.host.number("dynamo_component_kv_fetched_bytes_total")
    again = await in_two(prefill, decode, ask())
    assert again.tokens == first.tokens
    await decode.until(lambda: decode.host.number("dynamo_component_kv_fetches_total") == 2, "one fetch is missing")
    more = decode.host.number("dynamo_component_kv_fetched_bytes_total") - bytes_of_one
    assert more == bytes_of_one / 11  # The last block is not full, and nobody else's.
    usage = again.outputs[-1].completion_usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 40


async def test_both_tell_what_their_caches_hold(begin: Any) -> None:
    prefill, decode = await begin("prefill"), await begin("decode")
    await in_two(prefill, decode, ask())
    for side in (prefill, decode):
        stored = [event for event in side.host.events if isinstance(event, Stored)]
        assert sum(len(event.blocks) for event in stored) >= 10
    hashes = [
        [block.block_hash for event in side.host.events if isinstance(event, Stored) for block in event.blocks][:10]
        for side in (prefill, decode)
    ]
    assert hashes[0] == hashes[1]


async def test_a_prompt_that_nobody_holds_is_computed_by_the_decode_worker(begin: Any) -> None:
    whole, prefill, decode = await begin(), await begin("prefill", kv_hold_timeout=0.05), await begin("decode")
    want = (await whole.answer(ask())).tokens
    output = (await prefill.answer(prefill_leg(ask()))).outputs[0]
    await prefill.until(lambda: prefill.held == 0, "the blocks were never given up")
    got = await decode.answer(decode_leg(ask(), output.disaggregated_params or {}))
    assert got.tokens == want
    await decode.until(
        lambda: decode.host.number("dynamo_component_local_prefills_total", reason="not_held") == 1, "not counted"
    )
    assert prefill.host.number("dynamo_component_kv_holds_ended_total", outcome="given_up") == 1


async def test_a_prefill_worker_that_died_costs_a_prompt_and_no_answer(begin: Any) -> None:
    whole, prefill, decode = await begin(), await begin("prefill"), await begin("decode")
    want = (await whole.answer(ask())).tokens
    output = (await prefill.answer(prefill_leg(ask()))).outputs[0]
    await prefill.engine.stop()
    got = await decode.answer(decode_leg(ask(), output.disaggregated_params or {}))
    assert got.tokens == want
    await decode.is_clean()


@pytest.mark.parametrize("params", [{}, {"kv_transfer_params": {}}, {"prompt_tokens": 41}, {"prompt_tokens": "many"}])
async def test_params_that_are_of_no_use_are_ignored(begin: Any, params: dict[str, Any]) -> None:
    whole, decode = await begin(), await begin("decode")
    want = (await whole.answer(ask())).tokens
    assert (await decode.answer(decode_leg(ask(), params))).tokens == want
    assert decode.host.number("dynamo_component_local_prefills_total") == 1


async def test_another_block_size_is_computed_anew(begin: Any) -> None:
    whole, prefill, decode = await begin(), await begin("prefill", block_size=8), await begin("decode")
    want = (await whole.answer(ask())).tokens
    assert (await in_two(prefill, decode, ask())).tokens == want
    assert decode.host.number("dynamo_component_local_prefills_total", reason="layout") == 1


async def test_a_request_that_no_prefill_router_saw_is_refused(begin: Any) -> None:
    decode = await begin("decode")
    with pytest.raises(InvalidArgument, match="prefill_result"):
        decode.engine.submit(ask(), Reply())


async def test_a_decode_worker_computes_a_prompt_where_it_is_told_to(begin: Any) -> None:
    whole, decode = await begin(), await begin("decode")
    request = ask()
    want = (await whole.answer(request)).tokens
    request.annotations = [BYPASS_REMOTE_PREFILL]
    assert (await decode.answer(request)).tokens == want


async def test_abandoned_prefills_do_not_starve_the_pool(begin: Any) -> None:
    prefill = await begin("prefill", kv_cache_blocks=64, kv_hold_share=1.0, max_model_len=200)
    for first in range(12):
        await prefill.answer(prefill_leg(ask([first, *PROMPT[1:]])))
    assert prefill.held <= 64
    long = [(13 * place + 1) % 90 for place in range(190)]
    await prefill.answer(prefill_leg(ask(long)))
    assert prefill.host.number("dynamo_component_kv_holds_ended_total", outcome="given_up") >= 8


async def test_a_cancelled_prefill_holds_nothing(begin: Any) -> None:
    prefill = await begin("prefill")
    reply = Reply()
    prefill.engine.submit(prefill_leg(ask()), reply)
    prefill.engine.cancel(reply)
    await prefill.until(lambda: prefill.used == prefill.held, "blocks are left")
    assert not reply.is_finished


async def test_a_cancelled_decode_frees_both_sides(begin: Any) -> None:
    prefill, decode = await begin("prefill"), await begin("decode")
    for _ in range(5):
        output = (await prefill.answer(prefill_leg(ask()))).outputs[0]
        reply = Reply()
        decode.engine.submit(decode_leg(ask(max_tokens=200), output.disaggregated_params or {}), reply)
        await asyncio.sleep(0)
        decode.engine.cancel(reply)
        await prefill.is_clean()
        await decode.is_clean()
        assert not reply.is_finished


async def test_many_at_once_say_what_each_says_alone(begin: Any) -> None:
    """Fewer blocks and slots than all of them need at once."""
    whole = await begin()
    prefill = await begin("prefill", kv_cache_blocks=64, max_num_seqs=4, max_model_len=100)
    decode = await begin("decode", kv_cache_blocks=48, max_num_seqs=4, max_model_len=100)
    requests = [
        ask([(place * (n + 3)) % 90 for place in range(20 + n)], temperature=0.7 if n % 2 else 0.0, seed=n)
        for n in range(16)
    ]
    want = [(await whole.answer(request)).tokens for request in requests]
    got = await asyncio.gather(*(in_two(prefill, decode, request) for request in requests))
    assert [reply.tokens for reply in got] == want
    await prefill.is_clean()
    await decode.is_clean()
    assert prefill.engine.is_quiescent()


@pytest.mark.parametrize(
    "options",
    [
        {"disaggregation_mode": "encode"},
        {"disaggregation_mode": "prefill", "embedding_worker": True},
        {"kv_transfer": ["carrier-pigeon"]},
        {"kv_transfer": []},
        {"kv_transfer_timeout": 0.0},
        {"kv_hold_timeout": -1.0},
        {"kv_hold_share": 0.0},
        {"kv_transfer_port": 70000},
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CpuConfig(**options)
