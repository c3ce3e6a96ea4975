"""A row for every request."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import CompletionUsage, PromptTokensDetails
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.request_state import RequestState
from dynamo.serving.request_trace.payload import Tap
from dynamo.serving.request_trace.s3 import S3Options
from dynamo.serving.request_trace.trace import RequestTrace, TraceOptions, agent_context, input_trigger, replay

ON = {"DYN_REQUEST_TRACE": "1"}


def options(**variables: str) -> TraceOptions:
    found = TraceOptions.from_environment(ON | {f"DYN_REQUEST_TRACE_{name}": text for name, text in variables.items()})
    assert found is not None
    return found


def test_request_trace_is_off_without_its_variable() -> None:
    assert TraceOptions.from_environment({}) is None
    assert TraceOptions.from_environment({"DYN_REQUEST_TRACE": "0", "DYN_REQUEST_TRACE_SINKS": "nonsense"}) is None


def test_request_trace_defaults_equal_those_of_upstream() -> None:
    found = options()
    assert (found.records, found.sinks, found.capacity) == (("request_end", "tool"), ("file",), 1024)
    assert (found.file.gzip, found.file.roll_bytes, found.file.flush_s) == (True, 256 << 20, 1.0)
    assert found.file.path.endswith("dynamo-request-trace") and found.nats_subject == "dynamo.request_trace.v1"


def test_request_trace_reads_the_former_audit_variables() -> None:
    found = TraceOptions.from_environment({"DYN_AUDIT_SINKS": "stderr,nats", "DYN_AUDIT_NATS_SUBJECT": "s"})
    assert found is not None
    assert (found.sinks, found.records, found.nats_subject) == (("stderr", "nats"), ("request_payload",), "s")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SINKS", "file,kafka"),
        ("SINKS", "s3"),
        ("RECORDS", "everything"),
        ("FILE_FORMAT", "xml"),
        ("CAPACITY", "0"),
        ("FILE_FLUSH_INTERVAL_MS", "soon"),
        ("OTEL_MAX_PAYLOAD_BYTES", "0"),
        ("TOOL_EVENTS_ZMQ_ENDPOINT", "tcp://x"),
    ],
)
def test_request_trace_error_names_an_invalid_variable(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"DYN_REQUEST_TRACE_{name}"):
        options(**{name: text})


def test_request_trace_s3_options_have_released_defaults() -> None:
    found = options(SINKS="s3,otel", S3_BUCKET="b", S3_PREFIX="p/", S3_REGION="eu-north-1")
    assert (found.sinks, found.otel_max_payload_bytes) == (("s3", "otel"), 4 << 20)
    assert found.s3 == S3Options(bucket="b", prefix="p/", region="eu-north-1", roll_bytes=64 << 20, flush_s=10.0)
    assert options().s3 is None


def test_request_trace_never_captures_secret_headers() -> None:
    assert options(HTTP_HEADER_CAPTURE_LIST="X-Tenant, authorization,cookie,x-api-key").headers == {"x-tenant"}


def exchange(body: object = None, **headers: str) -> Any:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    def header(wanted: bytes) -> bytes | None:
        return next((value for name, value in pairs if name == wanted), None)

    found = SimpleNamespace(
        body=bytearray(json.dumps(body).encode()), headers=pairs, header=header, transport=SimpleNamespace(write=len)
    )

    def capture() -> Tap:
        found.transport = Tap(found.transport)
        return cast(Tap, found.transport)

    found.capture = capture
    return found


@pytest.mark.parametrize(
    ("headers", "session", "parent"),
    [
        ({"x_dynamo_session_id": "s", "x_dynamo_parent_session_id": "p"}, "s", "p"),
        (
            {"x_claude_code_session_id": "c", "x_claude_code_agent_id": "a", "x_claude_code_parent_agent_id": "b"},
            "a",
            "b",
        ),
        ({"session_id": "q1", "thread_id": "q2"}, "q2", None),
        ({"x_claude_code_session_id": "c"}, "c", None),
    ],
)
def test_agent_context_reads_session_ids_from_headers(
    headers: dict[str, str], session: str, parent: str | None
) -> None:
    context = agent_context(exchange({}, **headers))
    assert context is not None
    assert (context.session_id, context.parent_session_id) == (session, parent)


def test_agent_context_is_none_without_a_session() -> None:
    assert agent_context(exchange({}, x_dynamo_session_final="true")) is None


@pytest.mark.parametrize(
    ("body", "trigger"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "user_message"),
        ({"messages": [{"role": "user"}, {"role": "tool"}]}, "tool_result"),
        ({"messages": [{"role": "system"}]}, "other"),
        ({"messages": []}, "other"),
        ({"prompt": "x"}, "other"),
        ({"input": "hi"}, "user_message"),
        ({"input": [{"type": "function_call_output"}]}, "tool_result"),
        ([], "other"),
    ],
)
def test_input_trigger_is_derived_from_the_request_body(body: object, trigger: str) -> None:
    assert input_trigger(json.dumps(body).encode()) == trigger


def test_input_trigger_of_invalid_json_is_other() -> None:
    assert input_trigger(b"{") == "other"


def test_replay_hashes_of_a_partial_block_equal_those_of_upstream() -> None:
    """The numbers are those that the released frontend wrote for these tokens."""
    assert replay([5720, 2065, 1259], 64).input_sequence_hashes == [6098694128503340773]
    whole = replay(list(range(128)), 64)
    assert len(whole.input_sequence_hashes) == 2 and whole.input_length == 128


class Scene:
    """Trace, and responses that end."""

    def __init__(self, tmp_path: Path, **variables: str) -> None:
        self.path = tmp_path / "trace"
        self.registry = MetricsRegistry()
        found = options(FILE_PATH=str(self.path), FILE_FORMAT="jsonl", FILE_FLUSH_INTERVAL_MS="10", **variables)
        self.trace = RequestTrace(found, self.registry, "p")
        self.metrics = FrontendMetrics(self.registry)

    def answer(self, exchange: Any, tokens: int = 4, generations: int = 1) -> Any:
        record = RequestState(self.metrics, "chat_completions", "m", stream=True, started_s=100.0, request_id="r")
        record.sent_s, record.first_s, record.last_s, record.workers = 100.001, 100.003, 100.006, [7, 8][:generations]
        usage = CompletionUsage(3, tokens, 3 + tokens, PromptTokensDetails(2))
        one = SimpleNamespace(
            request=SimpleNamespace(token_ids=[5720, 2065, 1259]),
            tokens=tokens,
            counted=lambda: usage,
            choices=[SimpleNamespace(finish_reason="length"), SimpleNamespace(finish_reason=None)],
        )
        return SimpleNamespace(
            state=record,
            exchange=exchange,
            generations=[one] * generations,
        )

    async def rows(self) -> list[Any]:
        await self.trace.close()
        return [json.loads(line)["event"] for line in self.path.read_text().splitlines()] if self.path.exists() else []


async def test_request_trace_writes_one_row_at_request_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.trace.start()
    answer = scene.answer(exchange({}))
    scene.trace.begin(answer, 64)
    assert not isinstance(answer.exchange.transport, Tap), "no sink captures the text"
    scene.trace.end(answer, "")
    (row,) = await scene.rows()
    assert row["schema"] == "dynamo.request.trace.v1" and row["event_type"] == "request_end"
    assert "event_source" not in row and "agent_context" not in row
    request = row["request"]
    assert request["request_id"] == "r" and "model" not in request
    assert (request["input_tokens"], request["output_tokens"], request["cached_tokens"]) == (3, 4, 2)
    assert request["prefill_wait_time_ms"] + request["prefill_time_ms"] == pytest.approx(request["ttft_ms"])
    assert request["avg_itl_ms"] == pytest.approx(1.0)
    assert request["worker"] == {"prefill_worker_id": 7, "decode_worker_id": 7}
    assert request["replay"] == {
        "trace_block_size": 64,
        "input_length": 3,
        "input_sequence_hashes": [6098694128503340773],
    }


async def test_request_trace_row_of_an_agent_request_has_its_context_and_finish_reasons(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.trace.start()
    requested = exchange({}, x_dynamo_session_id="s", x_dynamo_session_final="true", x_request_id="mine")
    answer = scene.answer(requested)
    scene.trace.begin(answer, 0)
    scene.trace.end(answer, "")
    (row,) = await scene.rows()
    assert row["event_source"] == "dynamo"
    assert row["agent_context"] == {"session_id": "s", "session_final": True, "input_trigger": "other"}
    assert (row["request"]["x_request_id"], row["request"]["model"]) == ("mine", "m")
    assert row["request"]["finish_reason_metadata"]["choices"] == [
        {"choice_index": 0, "finish_reason": "length", "backend_finish_reason": "length"}
    ]
    assert "replay" not in row["request"]


async def test_request_trace_writes_one_row_per_prompt_of_a_batch(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.trace.start()
    answer = scene.answer(exchange({}), generations=2)
    scene.trace.begin(answer, 64)
    scene.trace.end(answer, "")
    assert [
        (row["request"]["request_id"], row["request"]["worker"]["decode_worker_id"]) for row in await scene.rows()
    ] == [
        ("r-0", 7),
        ("r-1", 8),
    ]


async def test_request_trace_records_payloads_and_captured_headers_in_one_line(tmp_path: Path) -> None:
    scene = Scene(tmp_path, RECORDS="request_payload", HTTP_HEADER_CAPTURE_LIST="x-tenant,authorization")
    await scene.trace.start()
    requested = exchange(None, x_tenant="blue", authorization="Bearer sk-secret")
    requested.body = bytearray(b'{\n "model": "m"\n}')
    answer = scene.answer(requested)
    scene.trace.begin(answer, 64)
    answer.exchange.transport.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"id":"x"}')
    scene.trace.end(answer, "")
    (row,) = await scene.rows()
    assert row["payload"] == {
        "request_id": "r",
        "endpoint": "openai.chat_completion",
        "model": "m",
        "request": {"model": "m"},
        "response": {"id": "x"},
        "http_request_headers": {"x-tenant": "blue"},
        "payload_complete": True,
    }


@pytest.mark.parametrize(("label", "message"), [("cancelled", "response_stream_dropped"), ("validation", "validation")])
async def test_request_trace_row_of_a_failed_response_has_a_drop_reason(
    tmp_path: Path, label: str, message: str
) -> None:
    scene = Scene(tmp_path, RECORDS="request_payload")
    await scene.trace.start()
    answer = scene.answer(exchange({}))
    scene.trace.begin(answer, 64)
    scene.trace.end(answer, label)
    (row,) = await scene.rows()
    assert row["payload"]["payload_complete"] is False
    assert row["payload"]["payload_drop_reason"] == message


async def test_request_trace_of_an_undecodable_response_keeps_the_request_payload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path, RECORDS="request_payload")
    await scene.trace.start()
    answer = scene.answer(exchange({}))
    scene.trace.begin(answer, 64)
    answer.exchange.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{broken")
    scene.trace.end(answer, "")
    (row,) = await scene.rows()
    assert row["payload"]["payload_drop_reason"] == "response_unreadable" and row["payload"]["request"] == {}
    assert "cannot be decoded" in caplog.text


async def test_rows_beyond_the_capacity_are_dropped_and_counted(tmp_path: Path) -> None:
    scene = Scene(tmp_path, CAPACITY="2")
    answer = scene.answer(exchange({}))
    for _ in range(5):
        scene.trace.end(answer, "")
    await scene.trace.start()
    assert len(await scene.rows()) == 2
    assert "p_request_trace_dropped_total 3" in scene.registry.render()


async def test_failing_sink_does_not_affect_other_sinks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(tmp_path)
    await scene.trace.start()

    class Full:
        name = "full"

        async def write(self, rows: object) -> None:
            raise OSError("no space left")

        async def close(self) -> None:
            raise OSError("no space left")

    scene.trace._sinks.insert(0, cast(Any, Full()))
    scene.trace.end(scene.answer(exchange({})), "")
    assert len(await scene.rows()) == 1
    assert "no space left" in caplog.text
    assert "p_request_trace_dropped_total 1" in scene.registry.render()


def test_trace_rows_omit_unset_fields() -> None:
    from dynamo.serving.request_trace.rows import TraceRow

    row = TraceRow(schema="s", event_type="request_end", event_time_unix_ms=1)
    assert msgspec.json.encode(row) == b'{"schema":"s","event_type":"request_end","event_time_unix_ms":1}'
