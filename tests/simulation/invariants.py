"""Invariants that every run keeps, for any seed."""

from typing import TYPE_CHECKING

from tests.simulation.clients import STATUSES, ReceivedResponse, SentRequest, expect, read
from tests.simulation.determinism import load_once
from tests.simulation.engine import LONG_PREFILL_S
from tests.simulation.loop import STARTS_AT_S
from tests.simulation.request_plane import ACK_TIMEOUT_S

from dynamo.http.server.service import SWEEP_S

if TYPE_CHECKING:
    from tests.simulation.simulation import FrontendMember, Simulation, WorkerMember

SLACK_S = 0.5
CODES = {"timeout": 504, "unavailable": 503, "overloaded": 529, "not_ready": 503, "model_not_found": 404}
CONNECT_S = 4.0  # Maximum age of a connection attempt to a process that is reachable again.
CHOICE_S = 1.0  # Maximum age of a routing decision while its connection was opened; newer workers were not candidates.
SILENCE_S = 2.5  # DYN_TCP_SILENCE_TIMEOUT, and time for the response to arrive.
BREAK_BOUND_S = 2.0  # Time within which attempts to connect to all other workers fail.
LASTING_TASKS = ("models.watch", "client.", "models.load of", "kv view of", "live")


def outcome(sent: SentRequest) -> str:
    """Return the outcome of a request as one line of the event log."""
    try:
        response = read(sent.wire)
    except (AssertionError, ValueError, KeyError) as error:
        return f"unreadable ({error})"
    text = response.error["message"] if response.error is not None else ""
    return f"{response.status} {sum(map(len, response.texts.values()))} chars {text}".rstrip()


def code_of(response: ReceivedResponse) -> int:
    """Return the status of an error, also of one inside a stream; 0 for a complete response."""
    if response.error is None:
        return 0
    code = response.error["code"] if response.status == 200 else response.status
    return CODES.get(code, code)


def verdict(sent: SentRequest) -> str:
    """Return the outcome of a request in one word."""
    try:
        code = code_of(read(sent.wire))
    except (AssertionError, ValueError, KeyError):
        return "unreadable"
    return str(code) if code else "complete"


def check_idle(simulation: "Simulation") -> None:
    """Check the state after recovery: all processes see each other, and no request is in flight."""
    for frontend in simulation.frontends:
        if frontend.is_up:
            _check_frontend(simulation, frontend)
    for worker in simulation.workers:
        if worker.is_up:
            _check_worker(simulation, worker)


def _check_frontend(simulation: "Simulation", frontend: "FrontendMember") -> None:
    name, now = frontend.name, simulation.loop.time()

    def require(holds: bool, what: str) -> None:
        if not holds:
            simulation.violation(f"{name} at rest: {what}")

    pipeline, plane = frontend.pipeline, frontend.plane
    require(pipeline.inflight == 0, f"{pipeline.inflight} answers are open")
    require(len(pipeline.tasks) == 0, f"{len(pipeline.tasks)} request tasks run")
    require(not pipeline._flusher.queue, "response data is not flushed")
    require(not any(plane.open_counts().values()), f"the plane holds {plane.open_counts()}")
    live = {f"{one.runtime.instance_id:x}" for one in simulation.workers if one.is_up}
    require(frontend.discovery.instances() == live, f"it sees {frontend.discovery.instances()}, there are {live}")
    for model in simulation.scenario.workers:
        there = sorted(one.runtime.instance_id for one in simulation.workers if one.is_up and one.model == model)
        sets = frontend.models.served().get(model, [])
        require(len(sets) == 1, f"{len(sets)} worker sets of {model}")
        for one in sets:
            client = one.client
            router = client._router
            router.validate()
            followed = sorted(record.instance_id for record, card in one.records.values() if card == one.checksum)
            require(one.worker_ids() == followed, f"{model}: it would choose from {one.worker_ids()}, not {followed}")
            require(bool(followed), f"{model}: it follows a card that no worker has")
            require(not router._inflight, f"{model}: {router._inflight} requests are counted as under way")
            if one.kv is not None:
                one.kv.machine.validate()
                require(not len(one.kv.machine.active), f"{model}: the KV router counts requests that are over")
                require(
                    not one.kv._prefilling, f"{model}: the KV router waits for first tokens of requests that are over"
                )
                require(not len(one.kv.machine.waiting), f"{model}: requests that are over wait in the KV router")
            require(
                all(until <= now for until in router._inhibited_until.values()),
                f"{model}: {router._inhibited_until} are still inhibited",
            )
            known = sorted(record.instance_id for record, _ in one.records.values())
            require(known == there == client.instance_ids(), f"{model}: it lists {known}, there are {there}")
        series = frontend.metrics.model(model)
        for gauge in ("inflight", "active", "queued"):
            value = getattr(series, gauge).value
            require(value == 0, f"{model}: the gauge of {gauge} requests is {value}")
    for one in frontend.models.every_set():
        if not one.answers_clients:
            under_way = one.client._router._inflight
            require(not under_way, f"{one.name}: {under_way} prefills are counted as under way")
        if not one.answers_clients and one.kv is not None:
            one.kv.machine.validate()
            require(not len(one.kv.machine.active), f"{one.name}: the KV router counts prefills that are over")
            require(not one.kv._prefilling, f"{one.name}: the KV router waits for prefills that are over")
    listening = sum(
        process is frontend.process for topic in simulation.event_network.topics.values() for process, _ in topic
    )
    monitors = sum(
        (one.monitor is not None) + (one.kv is not None and one.kv.view is not None)
        for one in frontend.models.every_set()
    )
    require(listening == monitors, f"{listening} subscribers for {monitors} sets that listen")
    tasks = [task.get_name() for task in frontend.process.tasks]
    require(all(task.startswith(LASTING_TASKS) for task in tasks), f"tasks {tasks}")


def _check_worker(simulation: "Simulation", worker: "WorkerMember") -> None:
    def require(holds: bool, what: str) -> None:
        if not holds:
            simulation.violation(f"{worker.name} at rest: {what}")

    require(worker.worker._admission.requests == 0, f"{worker.worker._admission.requests} requests are admitted")
    require(not worker.engine.runs, f"the engine works on {len(worker.engine.runs)} requests")
    require(worker.runtime.dispatcher.inflight == 0, f"{worker.runtime.dispatcher.inflight} requests are counted")
    require(not any(worker.plane.open_counts().values()), f"the plane holds {worker.plane.open_counts()}")
    tasks = [task.get_name() for task in worker.process.tasks]
    require(not tasks, f"tasks {tasks}")


def check_end(simulation: "Simulation") -> None:
    """Check the state after all processes were stopped: all have exited, and every request got its expected response."""
    for member in (*simulation.frontends, *simulation.workers):
        if member.is_alive:
            simulation.violation(f"{member.name} did not exit after SIGTERM")
    for failure in simulation.loop.failures:
        simulation.violation(f"unretrieved exception: {failure}")
    for sent in simulation.requests:
        for what in check_request(simulation, sent):
            simulation.violation(f"{sent.label}: {what}")


def untried_workers(simulation: "Simulation", sent: SentRequest, workers: list[int]) -> list[str]:
    """Return workers that the request's frontend sees, that could have responded, and that were not tried yet."""
    frontend, now = sent.frontend, simulation.loop.time()
    visible = {worker for one in frontend.models.served().get(sent.plan.model, []) for worker in one.worker_ids()}
    return [
        worker.name
        for worker in simulation.workers
        if worker.model == sent.plan.model
        and worker.is_up
        and worker.runtime.instance_id in visible - set(workers)
        and worker.served_s <= now - CHOICE_S
        and not simulation.is_disturbed(now - CONNECT_S, now, worker.name)
        and not simulation.is_disturbed(now - CONNECT_S, now, f"{worker.name}/{frontend.name}")
        # After all links of a frontend broke at once, it may have tried the others over broken connections.
        and not simulation.is_disturbed(now - CONNECT_S, now, f"{frontend.name}/links")
    ]


def was_unresponsive(simulation: "Simulation", sent: SentRequest, instance_id: int) -> bool:
    """Return whether a worker was recently unable to respond to the request's frontend; a paused frontend does not
    count.
    """
    name, now = simulation.names[instance_id], simulation.loop.time()
    return (
        instance_id in simulation.deaths
        or simulation.is_disturbed(now - SILENCE_S, now, name)
        or simulation.is_disturbed(now - SILENCE_S, now, f"{name}/{sent.frontend.name}")
    )


def check_request(simulation: "Simulation", sent: SentRequest) -> list[str]:
    """Return the violations of one request."""
    if sent.exchange.ends > 1:
        return [f"it was ended {sent.exchange.ends} times"]
    try:
        response = read(sent.wire)
    except (AssertionError, ValueError, KeyError) as error:
        return [f"its answer cannot be read: {error}"]
    wrong = _wrong_text(simulation, sent, response)
    if sent.ended_s is not None:
        wrong += _wrong_end(simulation, sent, response)
    elif sent.left_s is None:
        wrong.append("it never ended")
    return wrong


def _wrong_text(simulation: "Simulation", sent: SentRequest, response: ReceivedResponse) -> list[str]:
    plan, wrong = sent.plan, []
    expected = expect(plan, simulation.language, prompts(simulation, sent))
    is_whole = sent.ended_s is not None and response.error is None
    for index, text in response.texts.items():
        due = expected.texts.get(index)
        if due is None:
            wrong.append(f"choice {index} was not requested")
        elif is_whole and text != due:
            wrong.append(f"choice {index} is {text!r} instead of {due!r}")
        elif not due.startswith(text):
            wrong.append(f"choice {index} broke off with {text!r}, which does not begin {due!r}")
    if is_whole:
        if set(response.texts) != set(expected.texts):
            wrong.append(f"choices {sorted(response.texts)} instead of {sorted(expected.texts)}")
        if response.finishes != {index: [reason] for index, reason in expected.finishes.items()}:
            wrong.append(f"finish reasons {response.finishes} instead of {expected.finishes}")
    if any(len(reasons) > 1 for reasons in response.finishes.values()):
        wrong.append(f"finish reasons {response.finishes}")
    is_stream = bool(plan.body.get("stream"))
    wants_usage = not is_stream or "stream_options" in plan.body
    if is_whole and wants_usage:
        counted = response.usage and (response.usage["prompt_tokens"], response.usage["completion_tokens"])
        if counted != (expected.prompt_tokens, expected.completion_tokens):
            due_usage = (expected.prompt_tokens, expected.completion_tokens)
            wrong.append(f"usage {counted} instead of {due_usage}")
    return wrong


def _wrong_end(simulation: "Simulation", sent: SentRequest, response: ReceivedResponse) -> list[str]:
    wrong: list[str] = []
    plan, scenario = sent.plan, simulation.scenario
    assert sent.ended_s is not None
    if not response.is_complete:
        wrong.append("its response is not complete")
    is_stream = response.status == 200 and bool(plan.body.get("stream"))
    if is_stream and (response.dones != 1 or len(response.ids) > 1):
        wrong.append(f"{response.dones} [DONE]s and {len(response.ids)} ids in its stream")
    if response.error is not None:
        code = code_of(response)
        if code not in STATUSES:
            wrong.append(f"its error is {response.error}")
        if plan.is_probe or (scenario.is_calm and scenario.slots is None):
            wrong.append(f"it failed without a fault: {response.error}")
        quiet_s = sent.ended_s - max(sent.last_output_s, sent.sent_s)
        # Output of a choice that its stop string has ended does not show progress of the others.
        is_cut = plan.body.get("n", 1) > 1 and "stop" in plan.body
        if code == 504 and not is_cut and quiet_s < min(scenario.silence_s, ACK_TIMEOUT_S) - 1e-6:
            wrong.append(
                f"it was given up {quiet_s:.3f} s after its worker's last message; the limit is {scenario.silence_s:.3f}"
            )
    # With prefill workers, the prompt is computed again before the decode worker is chosen.
    break_bound_s = BREAK_BOUND_S + (LONG_PREFILL_S if scenario.prefills else 0.0)
    for part, workers in sent.parts.items():
        died_s = simulation.deaths.get(workers[-1])
        if part in sent.whole or died_s is None or sent.prefilled_s.get(part, 0.0) > died_s:
            continue  # A recomputed prompt may take as long as the limit of the whole response.
        is_late = sent.ended_s - died_s > break_bound_s
        if response.error is not None and is_late and not simulation.is_disturbed(died_s, sent.ended_s):
            wrong.append(f"its worker died at {died_s - STARTS_AT_S:.3f}, and the failure was not detected")
    wrong += [
        f"its worker failed at {failed_s - STARTS_AT_S:.3f}, and the failure was not handled"
        for failed_s in sent.failed_s.values()
        if sent.ended_s - failed_s > break_bound_s and not simulation.is_disturbed(failed_s, sent.ended_s)
    ]
    begin = max(sent.last_output_s, sent.sent_s)
    waited_s = sent.ended_s - begin - simulation.paused_s(sent.frontend.name, begin, sent.ended_s)
    limit_s = scenario.silence_s + 2 * SWEEP_S + SLACK_S  # One sweep sees the last token, the next detects the timeout.
    if waited_s > limit_s:
        wrong.append(f"it ended {waited_s:.3f} s after its last message at {begin - STARTS_AT_S:.3f}")
    return wrong


def prompts(simulation: "Simulation", sent: SentRequest) -> list[list[int]]:
    """Return the prompts of a request as tokens."""
    body = sent.plan.body
    if "prompt" in body:
        prompt = body["prompt"]
        return prompt if isinstance(prompt[0], list) else [prompt]
    from tests.simulation.simulation import demo_card

    from dynamo.core.codec import json_encode
    from dynamo.protocols.openai import decode_chat

    request = decode_chat(json_encode(body), ignore_unsupported=False)
    return [load_once(demo_card()).chat(request).token_ids]
