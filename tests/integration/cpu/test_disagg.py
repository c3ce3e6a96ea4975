"""Prefill and decode in two engines: the same tokens as in one engine, for every request and after every failure."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.certificates import Certificates
from tests.settle import turns, until
from tests.unit.cpu.conftest import CONFIG, ReceivedOutput, random_adapter, random_tensors

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.blocks import KvBlockPool
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.core import Core
from dynamo.cpu.disagg import fetch_of
from dynamo.cpu.engine import CpuEngine
from dynamo.cpu.generation import Fetch
from dynamo.cpu.layout import layout_of
from dynamo.cpu.lora import TARGETS
from dynamo.cpu.model import TransformerModel, load_weights
from dynamo.cpu.scheduler import Scheduler
from dynamo.kvbm.transfer.base import Deadline, Descriptor, Region, TransferError
from dynamo.kvbm.transfer.local import LocalPuller, LocalSource
from dynamo.kvbm.transfer.puller import Puller
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


class Reply(ReceivedOutput):
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
        return [word for word in self.messages if isinstance(word, EngineOutput)]

    def tokens_of(self, index: int) -> list[int]:
        return [
            token
            for word in self.messages
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
        """Return the sum of the series of that name with these labels."""
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
        await until(condition, what)

    @property
    def held(self) -> float:
        return self.host.number("dynamo_component_kv_held_blocks")

    @property
    def used(self) -> int:
        return self.engine._core.scheduler.pool.used

    async def is_clean(self) -> None:
        """Wait until no block is held, and check the block accounting."""
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


def send_request(prompt: list[int] | None = None, *, max_tokens: int = 10, **options: Any) -> PreprocessedRequest:
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


def prefill_request(request: PreprocessedRequest) -> PreprocessedRequest:
    """Return the prefill request as a frontend sends it."""
    return msgspec.structs.replace(
        request, stop_conditions=msgspec.structs.replace(request.stop_conditions, max_tokens=1)
    )


def decode_request(request: PreprocessedRequest, params: dict[str, Any]) -> PreprocessedRequest:
    travelled = msgspec.json.decode(msgspec.json.encode(params))
    return msgspec.structs.replace(request, prefill_result=PrefillResult(travelled))


async def in_two(prefill: Side, decode: Side, request: PreprocessedRequest) -> Reply:
    first = await prefill.answer(prefill_request(request))
    (output,) = first.outputs
    assert output.finish_reason == "length"
    assert output.disaggregated_params is not None
    return await decode.answer(decode_request(request, output.disaggregated_params))


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
async def test_disaggregated_output_equals_that_of_one_engine(begin: Any, kind: str) -> None:
    whole, prefill, decode = await begin(), await begin("prefill"), await begin("decode")
    options = dict(KINDS[kind])
    request = send_request(options.pop("prompt", None), **options)
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


async def test_disaggregated_decode_worker_computes_prompt_logprobs_itself(begin: Any) -> None:
    whole, prefill, decode = await begin(), await begin("prefill"), await begin("decode")
    request = send_request(temperature=0.9, seed=3)
    request.output_options.prompt_logprobs = 1
    want, got = await whole.answer(request), await in_two(prefill, decode, request)
    assert got.tokens == want.tokens
    assert got.outputs[0].engine_data is not None
    assert want.outputs[0].engine_data is not None
    assert len(got.outputs[0].engine_data["prompt_logprobs"]) == len(PROMPT)
    assert list(got.outputs[0].engine_data["prompt_logprobs"][5]) == list(
        want.outputs[0].engine_data["prompt_logprobs"][5]
    )
    await prefill.is_clean()
    await decode.is_clean()
    assert decode.host.number("dynamo_component_local_prefills_total", reason="prompt_logprobs") == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_disaggregated_blocks_use_the_available_transport(begin: Any, transport: str) -> None:
    prefill, decode = await begin("prefill", kv_transfer=[transport]), await begin("decode", kv_transfer=["shm", "tcp"])
    await in_two(prefill, decode, send_request())
    config: dict[str, Any] = CONFIG
    layers, heads, dim = config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]
    size = 11 * layers * 2 * heads * 4 * dim * 4
    await decode.until(
        lambda: decode.host.number("dynamo_component_kv_fetched_bytes_total", transport=transport) == size,
        "the blocks were not fetched so",
    )
    await decode.until(
        lambda: decode.host.number("dynamo_component_kv_fetches_total", outcome="ok") == 1, "not counted"
    )


async def test_disaggregated_blocks_are_those_of_the_prefill_worker(begin: Any) -> None:
    """Blocks of another prompt change the output: no block is recomputed silently."""
    whole, prefill, decode = await begin(), await begin("prefill"), await begin("decode", enable_prefix_caching=False)
    other = [(11 * place + 3) % 90 for place in range(41)]
    params = [
        (await prefill.answer(prefill_request(send_request(prompt)))).outputs[0].disaggregated_params
        for prompt in (PROMPT, other)
    ]
    right, wrong = dict(params[0]), dict(params[0]) | {"kv": params[1]["kv"]}
    want = (await whole.answer(send_request(max_tokens=20))).tokens
    assert (await decode.answer(decode_request(send_request(max_tokens=20), wrong))).tokens != want
    assert (await decode.answer(decode_request(send_request(max_tokens=20), right))).tokens == want


async def test_disaggregated_decode_does_not_fetch_cached_blocks(begin: Any) -> None:
    prefill, decode = await begin("prefill"), await begin("decode")
    first = await in_two(prefill, decode, send_request())
    # A fetch is counted after its blocks were handed over.
    await decode.until(lambda: decode.host.number("dynamo_component_kv_fetches_total") == 1, "the fetch is not counted")
    bytes_of_one = decode.host.number("dynamo_component_kv_fetched_bytes_total")
    again = await in_two(prefill, decode, send_request())
    assert again.tokens == first.tokens
    await decode.until(lambda: decode.host.number("dynamo_component_kv_fetches_total") == 2, "one fetch is missing")
    more = decode.host.number("dynamo_component_kv_fetched_bytes_total") - bytes_of_one
    assert more == bytes_of_one / 11  # The last block is not full, and not shared.
    usage = again.outputs[-1].completion_usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 40


async def test_disaggregated_workers_publish_their_cached_blocks(begin: Any) -> None:
    prefill, decode = await begin("prefill"), await begin("decode")
    await in_two(prefill, decode, send_request())
    for side in (prefill, decode):
        stored = [event for event in side.host.events if isinstance(event, Stored)]
        assert sum(len(event.blocks) for event in stored) >= 10
    hashes = [
        [block.block_hash for event in side.host.events if isinstance(event, Stored) for block in event.blocks][:10]
        for side in (prefill, decode)
    ]
    assert hashes[0] == hashes[1]


async def test_disaggregated_decode_computes_a_prompt_without_prefill_result(begin: Any) -> None:
    whole, prefill, decode = await begin(), await begin("prefill", kv_hold_timeout=0.05), await begin("decode")
    want = (await whole.answer(send_request())).tokens
    output = (await prefill.answer(prefill_request(send_request()))).outputs[0]
    await prefill.until(lambda: prefill.held == 0, "the blocks were never given up")
    got = await decode.answer(decode_request(send_request(), output.disaggregated_params or {}))
    assert got.tokens == want
    await decode.until(
        lambda: decode.host.number("dynamo_component_local_prefills_total", reason="not_held") == 1, "not counted"
    )
    assert prefill.host.number("dynamo_component_kv_holds_ended_total", outcome="given_up") == 1


async def test_disaggregated_prefill_failure_causes_only_recomputation(begin: Any) -> None:
    whole, prefill, decode = await begin(), await begin("prefill"), await begin("decode")
    want = (await whole.answer(send_request())).tokens
    output = (await prefill.answer(prefill_request(send_request()))).outputs[0]
    await prefill.engine.stop()
    got = await decode.answer(decode_request(send_request(), output.disaggregated_params or {}))
    assert got.tokens == want
    await decode.is_clean()


@pytest.mark.parametrize("params", [{}, {"kv_transfer_params": {}}, {"prompt_tokens": 41}, {"prompt_tokens": "many"}])
async def test_disaggregated_decode_ignores_unusable_transfer_parameters(begin: Any, params: dict[str, Any]) -> None:
    whole, decode = await begin(), await begin("decode")
    want = (await whole.answer(send_request())).tokens
    assert (await decode.answer(decode_request(send_request(), params))).tokens == want
    await decode.until(lambda: decode.host.number("dynamo_component_local_prefills_total") == 1, "not counted")


async def test_disaggregated_decode_recomputes_blocks_of_another_size(begin: Any) -> None:
    whole, prefill, decode = await begin(), await begin("prefill", block_size=8), await begin("decode")
    want = (await whole.answer(send_request())).tokens
    assert (await in_two(prefill, decode, send_request())).tokens == want
    await decode.until(
        lambda: decode.host.number("dynamo_component_local_prefills_total", reason="layout") == 1, "not counted"
    )


async def test_disaggregated_decode_refuses_a_request_without_prefill_router(begin: Any) -> None:
    decode = await begin("decode")
    with pytest.raises(InvalidArgument, match="prefill_result"):
        decode.engine.submit(send_request(), Reply())


async def test_disaggregated_decode_computes_locally_on_request(begin: Any) -> None:
    whole, decode = await begin(), await begin("decode")
    request = send_request()
    want = (await whole.answer(request)).tokens
    request.annotations = [BYPASS_REMOTE_PREFILL]
    assert (await decode.answer(request)).tokens == want


async def test_disaggregated_abandoned_prefills_are_released(begin: Any) -> None:
    prefill = await begin("prefill", kv_cache_blocks=64, kv_hold_share=1.0, max_model_len=200)
    for first in range(12):
        await prefill.answer(prefill_request(send_request([first, *PROMPT[1:]])))
    assert prefill.held <= 64
    long = [(13 * place + 1) % 90 for place in range(190)]
    await prefill.answer(prefill_request(send_request(long)))
    assert prefill.host.number("dynamo_component_kv_holds_ended_total", outcome="given_up") >= 8


async def test_disaggregated_cancelled_prefill_holds_no_blocks(begin: Any) -> None:
    prefill = await begin("prefill")
    reply = Reply()
    prefill.engine.submit(prefill_request(send_request()), reply)
    prefill.engine.cancel(reply)
    await prefill.until(lambda: prefill.used == prefill.held, "blocks are left")
    assert not reply.is_finished


async def test_disaggregated_cancelled_decode_frees_both_sides(begin: Any) -> None:
    prefill, decode = await begin("prefill"), await begin("decode")
    for _ in range(5):
        output = (await prefill.answer(prefill_request(send_request()))).outputs[0]
        reply = Reply()
        decode.engine.submit(decode_request(send_request(max_tokens=200), output.disaggregated_params or {}), reply)
        await turns()
        decode.engine.cancel(reply)
        await prefill.is_clean()
        await decode.is_clean()
        assert not reply.is_finished


async def test_disaggregated_concurrent_output_equals_that_of_single_requests(begin: Any) -> None:
    """Fewer blocks and slots than all requests need at once."""
    whole = await begin()
    prefill = await begin("prefill", kv_cache_blocks=64, max_num_seqs=4, max_model_len=100)
    decode = await begin("decode", kv_cache_blocks=48, max_num_seqs=4, max_model_len=100)
    requests = [
        send_request([(place * (n + 3)) % 90 for place in range(20 + n)], temperature=0.7 if n % 2 else 0.0, seed=n)
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
def test_disaggregated_contradictory_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CpuConfig(**options)


# Two cores that the test steps, with no other thread.


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"choices": 2, "temperature": 0.8, "seed": 1},
]


class ManualPuller:
    """Puller whose fetches end on demand."""

    def __init__(self) -> None:
        self.begun: list[Fetch] = []
        self.abandoned: list[Fetch] = []

    def begin(self, fetch: Fetch) -> None:
        self.begun.append(fetch)

    def abandon(self, fetch: Fetch) -> None:
        assert fetch not in self.abandoned, "abandoned twice"
        self.abandoned.append(fetch)


class ManualExporter:
    """Exporter whose blocks are returned at the next step."""

    def __init__(self, source: LocalSource) -> None:
        self.source = source
        self.freed: list[list[int]] = []

    def export(self, blocks: Any) -> Descriptor | None:
        return self.source.publish(blocks)

    def release_oldest(self) -> None:
        self.source.drop_oldest()


@pytest.fixture(scope="module")
def models(model: str) -> list[TransformerModel]:
    shape = Architecture.read(model)
    return [
        TransformerModel(shape, load_weights(model, shape), slots=30 * 4, rows_max=64, longest=200) for _ in range(2)
    ]


class CorePair:
    """A prefill and a decode core; `rng` draws the next step."""

    def __init__(
        self, model: str, models: list[TransformerModel], make_generation: Callable[..., Any], rng: random.Random
    ) -> None:
        layout = layout_of(model, models[0].shape, 4)
        here, there = Region(layout, models[1].cache.pages), Region(layout, models[0].cache.pages)
        self.freed: list[list[int]] = []
        self.source = LocalSource(there, lambda blocks: self.freed.append(list(blocks)), blocks_max=20)
        self.puller = Puller(here, [LocalPuller(here, self.source)])
        self.hand = ManualPuller()
        self.layout = layout
        self.rng = rng
        self.make = make_generation
        schedulers = [Scheduler(KvBlockPool(30), sequences_max=4, batched_tokens_max=16) for _ in models]
        self.prefill = Core(models[0], schedulers[0], 4, exporter=ManualExporter(self.source))
        self.decode = Core(models[1], schedulers[1], 4, puller=self.hand)
        self.firsts: dict[Any, int] = {}
        self.decoding: dict[int, Any] = {}
        self.gone: set[int] = set()

    def begin(self, number: int, prompt: list[int], options: dict[str, Any]) -> None:
        generation = self.make(prompt, **(options | {"max_tokens": 1}))
        generation.is_prefill = True
        self.firsts[generation] = number
        self.prefill.add(generation)

    def turn(self, prompts: list[list[int]], options: list[dict[str, Any]], deliver: Callable[[Any], None]) -> None:
        what = self.rng.choice(["prefill", "decode", "decode", "decode", "fetch", "fetch", "cancel", "expire"])
        if what == "prefill":
            outcome = self.prefill.step()
            for printed in outcome.outputs:
                self._hand_over(self.firsts.pop(printed.generation), printed.word, prompts, options)
        elif what == "decode":
            deliver(self.decode.step())
        elif what == "fetch" and self.hand.begun:
            self._fetch(self.hand.begun.pop(self.rng.randrange(len(self.hand.begun))))
        elif what == "cancel" and self.decoding and self.rng.random() < 0.1:
            number = self.rng.choice(list(self.decoding))
            self.gone.add(number)
            self.decode.drop(self.decoding[number])
        elif what == "expire" and self.rng.random() < 0.1:
            self.source.drop_oldest()
        while self.freed:
            self.prefill.scheduler.release_export(self.freed.pop())
        self.prefill.scheduler.validate()
        self.decode.scheduler.validate()

    def _hand_over(self, number: int, output: Any, prompts: list[list[int]], options: list[dict[str, Any]]) -> None:
        generation = self.make(prompts[number], **options[number])
        try:
            generation.fetch = fetch_of(
                output.disaggregated_params, prompts[number], self.layout, 96, Deadline.after(60.0), asks_logprobs=False
            )
        except TransferError:
            generation.fetch = None  # The prefill worker had no space to keep it.
        self.decoding[number] = generation
        self.decode.add(generation)

    def _fetch(self, fetch: Fetch) -> None:
        sequence = fetch.sequence
        assert sequence is not None
        cached = sequence.computed // 4
        is_whole = self.rng.random() < 0.8
        if is_whole:
            try:
                self.puller.pull(fetch.descriptor, list(enumerate(sequence.blocks))[cached:], fetch.deadline)
            except TransferError:
                is_whole = False
        self.decode.end_fetch(fetch, is_whole=is_whole)
        self.puller.release(fetch.descriptor)

    @property
    def is_over(self) -> bool:
        waits = self.prefill.has_work or self.decode.has_work or self.hand.begun or self.firsts
        return not waits and not self.decode.scheduler.waiting


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_disaggregated_output_is_equal_under_any_order_of_faults(
    seed: int, model: str, models: list[TransformerModel], make_generation: Any, deliver: Any, run: Any
) -> None:
    rng = random.Random(seed)
    common = [rng.randrange(90) for _ in range(12)]
    prompts = [[*common[: rng.choice([0, 8, 12])], *(rng.randrange(90) for _ in range(rng.randint(1, 20)))] for _ in range(6)]  # fmt: skip
    options: list[dict[str, Any]] = [{"max_tokens": rng.randint(1, 8)} | rng.choice(SAMPLINGS) for _ in prompts]
    want = []
    for prompt, requested in zip(prompts, options, strict=True):
        core = Core(models[1], Scheduler(KvBlockPool(30, is_caching=False), sequences_max=4, batched_tokens_max=64), 4)
        generation = make_generation(prompt, **requested)
        core.add(generation)
        run(core)
        want.append(spoken(generation.reply))
    cores = CorePair(model, models, make_generation, rng)
    for number, prompt in enumerate(prompts):
        requested = {name: value for name, value in options[number].items() if name != "choices"}
        cores.begin(number, prompt, requested)
    turns = 0
    while not cores.is_over:
        turns += 1
        assert turns < 5000, "it never came to an end"
        cores.turn(prompts, options, deliver)
    for number, generation in cores.decoding.items():
        if number not in cores.gone:
            assert spoken(generation.reply) == want[number]
    assert cores.decoding.keys() == set(range(len(prompts)))
    cores.source.close()
    while cores.freed:
        cores.prefill.scheduler.release_export(cores.freed.pop())
    assert cores.prefill.scheduler.pool.used == cores.decode.scheduler.pool.used == 0


def spoken(reply: Any) -> list[list[int]]:
    """Return the tokens of each choice."""
    printed: dict[int, list[int]] = {}
    for word in reply.messages:
        index, tokens = (0, [word]) if isinstance(word, int) else (word.index, word.token_ids)
        printed.setdefault(index, []).extend(tokens)
    return [printed[index] for index in sorted(printed)]


async def test_disaggregated_transfer_uses_request_plane_certificates(begin: Any, tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    secured = {
        "tcp_tls_cert_path": files.cert,
        "tcp_tls_key_path": files.key,
        "tcp_tls_ca_cert_path": files.ca,
        "kv_transfer": ["tcp"],
    }
    prefill, decode = await begin("prefill", **secured), await begin("decode", **secured)
    await in_two(prefill, decode, send_request())
    await decode.until(
        lambda: decode.host.number("dynamo_component_kv_fetches_total", outcome="ok") == 1, "not fetched"
    )
    plain = await begin("decode", kv_transfer=["tcp"])
    await in_two(prefill, plain, send_request())
    assert plain.host.number("dynamo_component_kv_fetches_total", outcome="ok") == 0


async def test_disaggregated_prompt_of_another_adapter_is_computed_by_the_decode_worker(
    begin: Any, write_adapter: Callable[..., str]
) -> None:
    one, other = (write_adapter(random_adapter(CONFIG, targets=TARGETS, seed=seed)) for seed in (1, 2))
    sides = [await begin(role, enable_lora=True) for role in ("agg", "prefill", "decode")]
    for side in sides:
        await side.engine._adapters.load("tuned", one)
    whole, prefill, decode = sides
    request = msgspec.structs.replace(send_request(), routing=Routing(lora_name="tuned"))
    want = (await whole.answer(request)).tokens
    assert want != (await whole.answer(send_request())).tokens
    assert (await in_two(prefill, decode, request)).tokens == want
    assert decode.host.number("dynamo_component_local_prefills_total") == 0
    await prefill.is_clean()
    for side in (whole, decode):
        await side.engine._adapters.unload("tuned")
        await side.engine._adapters.load("tuned", other)
    assert (await in_two(prefill, decode, request)).tokens == (await whole.answer(request)).tokens != want
    await decode.until(lambda: decode.host.number("dynamo_component_local_prefills_total") == 1, "not counted")
