"""Invariants: what must hold of every run, whatever its seed."""

from typing import TYPE_CHECKING

from tests.simulation.clients import STATUSES, Sent, Told, expect, read
from tests.simulation.determinism import load_once
from tests.simulation.engine import LONG_PREFILL_S
from tests.simulation.loop import STARTS_AT_S
from tests.simulation.request_plane import ACK_TIMEOUT_S

from dynamo.http.server.service import SWEEP_S

if TYPE_CHECKING:
    from tests.simulation.world import FrontendMember, WorkerMember, World

SLACK_S = 0.5
CODES = {"timeout": 504, "unavailable": 503, "overloaded": 529, "not_ready": 503, "model_not_found": 404}
CONNECT_S = 4.0  # For so long a request may have tried to connect to somebody who is reachable again by now.
CHOICE_S = (
    1.0  # A worker was chosen so long ago at most, while the connection to it was opened; later ones were no choice.
)
SILENCE_S = 2.5  # DYN_TCP_SILENCE_TIMEOUT, and some time for the answer to travel.
BREAK_BOUND_S = 2.0  # Every other worker is tried, and cannot be connected, sooner.
LASTING_TASKS = ("models.watch", "client.", "models.load of", "kv view of", "live")


def outcome(sent: Sent) -> str:
    """One line for the event log."""
    try:
        told = read(sent.wire)
    except (AssertionError, ValueError, KeyError) as error:
        return f"unreadable ({error})"
    text = told.error["message"] if told.error is not None else ""
    return f"{told.status} {sum(map(len, told.texts.values()))} chars {text}".rstrip()


def code_of(told: Told) -> int:
    """The status of an error, also of one that came in a stream; 0 for an answer that is complete."""
    if told.error is None:
        return 0
    code = told.error["code"] if told.status == 200 else told.status
    return CODES.get(code, code)


def verdict(sent: Sent) -> str:
    """What became of a request, in one word."""
    try:
        code = code_of(read(sent.wire))
    except (AssertionError, ValueError, KeyError):
        return "unreadable"
    return str(code) if code else "complete"


def judge_rest(world: "World") -> None:
    """After healing and settling: everyone sees everyone, and nothing is under way."""
    for frontend in world.frontends:
        if frontend.is_up:
            _judge_frontend(world, frontend)
    for worker in world.workers:
        if worker.is_up:
            _judge_worker(world, worker)


def _judge_frontend(world: "World", frontend: "FrontendMember") -> None:
    name, now = frontend.name, world.loop.time()

    def must(holds: bool, what: str) -> None:
        if not holds:
            world.violation(f"{name} at rest: {what}")

    pipeline, plane = frontend.pipeline, frontend.plane
    must(pipeline.inflight == 0, f"{pipeline.inflight} answers are open")
    must(len(pipeline.tasks) == 0, f"{len(pipeline.tasks)} request tasks run")
    must(not pipeline._flusher._waiting, "pieces wait to be written")
    must(not any(plane.open_things().values()), f"the plane holds {plane.open_things()}")
    live = {f"{one.runtime.instance_id:x}" for one in world.workers if one.is_up}
    must(frontend.discovery.instances() == live, f"it sees {frontend.discovery.instances()}, there are {live}")
    for model in world.scenario.workers:
        there = sorted(one.runtime.instance_id for one in world.workers if one.is_up and one.model == model)
        sets = frontend.models.served().get(model, [])
        must(len(sets) == 1, f"{len(sets)} worker sets of {model}")
        for one in sets:
            client = one.client
            router = client._router
            router.validate()
            followed = sorted(record.instance_id for record, card in one.records.values() if card == one.checksum)
            must(one.worker_ids() == followed, f"{model}: it would choose from {one.worker_ids()}, not {followed}")
            must(bool(followed), f"{model}: it follows a card that nobody has")
            must(not router._inflight, f"{model}: {router._inflight} requests are counted as under way")
            if one.kv is not None:
                one.kv.machine.validate()
                must(not len(one.kv.machine.active), f"{model}: the KV router counts requests that are over")
                must(not one.kv._prefilling, f"{model}: the KV router waits for first tokens of requests that are over")
                must(not len(one.kv.machine.waiting), f"{model}: requests that are over wait in the KV router")
            must(
                all(until <= now for until in router._inhibited_until.values()),
                f"{model}: {router._inhibited_until} are still passed over",
            )
            known = sorted(record.instance_id for record, _ in one.records.values())
            must(known == there == client.instance_ids(), f"{model}: it knows {known}, there are {there}")
        series = frontend.metrics.model(model)
        for gauge in ("inflight", "active", "queued"):
            value = getattr(series, gauge).value
            must(value == 0, f"{model}: the gauge of {gauge} requests says {value}")
    for one in frontend.models.every_set():
        if not one.answers_clients:
            under_way = one.client._router._inflight
            must(not under_way, f"{one.name}: {under_way} prefills are counted as under way")
        if not one.answers_clients and one.kv is not None:
            one.kv.machine.validate()
            must(not len(one.kv.machine.active), f"{one.name}: the KV router counts prefills that are over")
            must(not one.kv._prefilling, f"{one.name}: the KV router waits for prefills that are over")
    listening = sum(process is frontend.process for topic in world.ether.topics.values() for process, _ in topic)
    monitors = sum(
        (one.monitor is not None) + (one.kv is not None and one.kv.view is not None)
        for one in frontend.models.every_set()
    )
    must(listening == monitors, f"{listening} subscribers for {monitors} sets that listen")
    tasks = [task.get_name() for task in frontend.process.tasks]
    must(all(task.startswith(LASTING_TASKS) for task in tasks), f"tasks {tasks}")


def _judge_worker(world: "World", worker: "WorkerMember") -> None:
    def must(holds: bool, what: str) -> None:
        if not holds:
            world.violation(f"{worker.name} at rest: {what}")

    must(worker.worker._admission.requests == 0, f"{worker.worker._admission.requests} requests are admitted")
    must(not worker.engine.runs, f"the engine works on {len(worker.engine.runs)} requests")
    must(worker.runtime.dispatcher.inflight == 0, f"{worker.runtime.dispatcher.inflight} requests are counted")
    must(not any(worker.plane.open_things().values()), f"the plane holds {worker.plane.open_things()}")
    tasks = [task.get_name() for task in worker.process.tasks]
    must(not tasks, f"tasks {tasks}")


def judge_end(world: "World") -> None:
    """After every process was stopped: none is left, and every request got its due response."""
    for member in (*world.frontends, *world.workers):
        if member.is_alive:
            world.violation(f"{member.name} did not end when it was told to")
    for failure in world.loop.failures:
        world.violation(f"nobody looked at: {failure}")
    for sent in world.requests:
        for what in judge_request(world, sent):
            world.violation(f"{sent.label}: {what}")


def untried(world: "World", sent: Sent, workers: list[int]) -> list[str]:
    """Workers that the request's frontend sees, that could have answered, and that were not tried yet."""
    frontend, now = sent.frontend, world.loop.time()
    visible = {worker for one in frontend.models.served().get(sent.plan.model, []) for worker in one.worker_ids()}
    return [
        worker.name
        for worker in world.workers
        if worker.model == sent.plan.model
        and worker.is_up
        and worker.runtime.instance_id in visible - set(workers)
        and worker.served_s <= now - CHOICE_S
        and not world.is_disturbed(now - CONNECT_S, now, worker.name)
        and not world.is_disturbed(now - CONNECT_S, now, f"{worker.name}/{frontend.name}")
        # Where all links of a frontend broke at once, it may have tried the others over broken connections.
        and not world.is_disturbed(now - CONNECT_S, now, f"{frontend.name}/links")
    ]


def stood_still(world: "World", sent: Sent, instance_id: int) -> bool:
    """Whether a worker could not answer the request's frontend a moment ago; a frontend that slept proves nothing."""
    name, now = world.names[instance_id], world.loop.time()
    return (
        instance_id in world.deaths
        or world.is_disturbed(now - SILENCE_S, now, name)
        or world.is_disturbed(now - SILENCE_S, now, f"{name}/{sent.frontend.name}")
    )


def judge_request(world: "World", sent: Sent) -> list[str]:
    """What is wrong with one request."""
    if sent.exchange.ends > 1:
        return [f"it was ended {sent.exchange.ends} times"]
    try:
        told = read(sent.wire)
    except (AssertionError, ValueError, KeyError) as error:
        return [f"its answer cannot be read: {error}"]
    wrong = _wrong_text(world, sent, told)
    if sent.ended_s is not None:
        wrong += _wrong_end(world, sent, told)
    elif sent.left_s is None:
        wrong.append("it never ended")
    return wrong


def _wrong_text(world: "World", sent: Sent, told: Told) -> list[str]:
    plan, wrong = sent.plan, []
    expected = expect(plan, world.language, prompts(world, sent))
    is_whole = sent.ended_s is not None and told.error is None
    for index, text in told.texts.items():
        due = expected.texts.get(index)
        if due is None:
            wrong.append(f"choice {index} was not asked for")
        elif is_whole and text != due:
            wrong.append(f"choice {index} says {text!r} instead of {due!r}")
        elif not due.startswith(text):
            wrong.append(f"choice {index} broke off with {text!r}, which does not begin {due!r}")
    if is_whole:
        if set(told.texts) != set(expected.texts):
            wrong.append(f"choices {sorted(told.texts)} instead of {sorted(expected.texts)}")
        if told.finishes != {index: [reason] for index, reason in expected.finishes.items()}:
            wrong.append(f"finish reasons {told.finishes} instead of {expected.finishes}")
    if any(len(reasons) > 1 for reasons in told.finishes.values()):
        wrong.append(f"finish reasons {told.finishes}")
    is_stream = bool(plan.body.get("stream"))
    wants_usage = not is_stream or "stream_options" in plan.body
    if is_whole and wants_usage:
        counted = told.usage and (told.usage["prompt_tokens"], told.usage["completion_tokens"])
        if counted != (expected.prompt_tokens, expected.completion_tokens):
            due_usage = (expected.prompt_tokens, expected.completion_tokens)
            wrong.append(f"usage {counted} instead of {due_usage}")
    return wrong


def _wrong_end(world: "World", sent: Sent, told: Told) -> list[str]:
    wrong: list[str] = []
    plan, scenario = sent.plan, world.scenario
    assert sent.ended_s is not None
    if not told.is_complete:
        wrong.append("its response is not complete")
    is_stream = told.status == 200 and bool(plan.body.get("stream"))
    if is_stream and (told.dones != 1 or len(told.ids) > 1):
        wrong.append(f"{told.dones} [DONE]s and {len(told.ids)} ids in its stream")
    if told.error is not None:
        code = code_of(told)
        if code not in STATUSES:
            wrong.append(f"its error is {told.error}")
        if plan.is_probe or (scenario.is_calm and scenario.slots is None):
            wrong.append(f"it failed although nothing was wrong: {told.error}")
        quiet_s = sent.ended_s - max(sent.heard_s, sent.sent_s)
        # What is still said of a choice that its stop string has cut is no sign of life of the others.
        is_cut = plan.body.get("n", 1) > 1 and "stop" in plan.body
        if code == 504 and not is_cut and quiet_s < min(scenario.silence_s, ACK_TIMEOUT_S) - 1e-6:
            wrong.append(
                f"it was given up {quiet_s:.3f} s after its worker spoke; the limit is {scenario.silence_s:.3f}"
            )
    # Where there are prefill workers, the prompt is computed again before it is known who decodes.
    break_bound_s = BREAK_BOUND_S + (LONG_PREFILL_S if scenario.prefills else 0.0)
    for part, workers in sent.parts.items():
        died_s = world.deaths.get(workers[-1])
        if part in sent.whole or died_s is None or sent.prefilled_s.get(part, 0.0) > died_s:
            continue  # A prompt that is computed again may take as long as the limit of the whole response.
        is_late = sent.ended_s - died_s > break_bound_s
        if told.error is not None and is_late and not world.is_disturbed(died_s, sent.ended_s):
            wrong.append(f"its worker died at {died_s - STARTS_AT_S:.3f}, and nobody noticed")
    wrong += [
        f"its worker failed at {broke_s - STARTS_AT_S:.3f}, and nothing was done about it"
        for broke_s in sent.broke_s.values()
        if sent.ended_s - broke_s > break_bound_s and not world.is_disturbed(broke_s, sent.ended_s)
    ]
    begin = max(sent.heard_s, sent.sent_s)
    waited_s = sent.ended_s - begin - world.paused_s(sent.frontend.name, begin, sent.ended_s)
    limit_s = scenario.silence_s + 2 * SWEEP_S + SLACK_S  # One sweep sees the last token, the next the silence.
    if waited_s > limit_s:
        wrong.append(f"it ended {waited_s:.3f} s after its last sign of life at {begin - STARTS_AT_S:.3f}")
    return wrong


def prompts(world: "World", sent: Sent) -> list[list[int]]:
    """The tokens that were to be continued."""
    body = sent.plan.body
    if "prompt" in body:
        prompt = body["prompt"]
        return prompt if isinstance(prompt[0], list) else [prompt]
    from tests.simulation.world import demo_card

    from dynamo.core.codec import json_encode
    from dynamo.protocols.openai import decode_chat

    request = decode_chat(json_encode(body), ignore_unsupported=False)
    return [load_once(demo_card()).chat(request).token_ids]
