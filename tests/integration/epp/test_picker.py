"""The endpoint picker over real workers, driven by a gateway made from Envoy's public protobuf definitions."""

import contextlib
import gzip
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
import pytest
from benchmarks.ports import free_port
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from tests.cluster.classifier import classifier
from tests.cluster.cluster import Cluster
from tests.cluster.gateway import BUFFERED, CHAT_PATH, DESTINATION, STREAMED, GatewayStream, mutated, refusal
from tests.cluster.processes import DEADLINE_S, wait_until

from dynamo.grpc.health import CLASSES as HEALTH_CLASSES
from dynamo.grpc.health import HEALTH_SERVICE, NOT_SERVING, SERVING

pytestmark = [pytest.mark.integration, pytest.mark.kserve]

BLOCK = 16
QUICK = ("--block-size", str(BLOCK), "--speedup-ratio", "0")
WORKER, RANK = "x-dynamo-worker-instance-id", "x-dynamo-dp-rank"
PREFILL, PREFILL_RANK = "x-dynamo-prefill-instance-id", "x-dynamo-prefill-dp-rank"
MODE = "x-dynamo-routing-mode"


def chat(number: int, words: int = 60, **fields: Any) -> dict[str, Any]:
    """Return a chat whose prompt shares no block with those of other numbers."""
    text = " ".join(f"{number * 1000 + word}" for word in range(words))
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


class Picker:
    """One process of the picker and a channel to it."""

    def __init__(self, cluster: Cluster, *flags: str, secure: bool = False, **variables: str) -> None:
        self.port, self.health, self.metrics = free_port(), free_port(), free_port()
        ports = {"--grpc-port": self.port, "--grpc-health-port": self.health, "--metrics-port": self.metrics}
        argv = [word for flag, port in ports.items() for word in (flag, str(port))]
        if not secure:
            argv.append("--no-secure-serving")
        variables = {"DYN_EPP_GRACEFUL_SHUTDOWN_PROPAGATION_SECS": "0", **variables}
        self.process: subprocess.Popen[bytes] = cluster.run(
            "epp", "--host", "127.0.0.1", "--target-port", str(cluster.port), *argv, *flags, **variables
        )
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self._health = grpc.insecure_channel(f"127.0.0.1:{self.health}")
        cluster.wait_until(lambda: self.status() is not None, "the picker does not listen")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.channel.close()
        self._health.close()

    def status(self, service: str = "inference-extension") -> int | None:
        """Return the status that a probe gets, None while the picker does not listen."""
        check = self._health.unary_unary(
            f"/{HEALTH_SERVICE}/Check", response_deserializer=HEALTH_CLASSES["HealthCheckResponse"].FromString
        )
        try:
            return int(
                check(
                    HEALTH_CLASSES["HealthCheckRequest"](service=service).SerializeToString(), timeout=DEADLINE_S
                ).status
            )
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None

    def is_serving(self) -> bool:
        return self.status() == SERVING

    def stream(self) -> GatewayStream:
        return GatewayStream(self.channel)

    def pick(self, body: dict[str, Any], headers: dict[str, str] | None = None, **more: Any) -> dict[str, str]:
        """Return the headers of a request that ends at once."""
        with self.stream() as stream:
            return stream.pick(body, headers, **more)

    def refused(self, body: bytes, **more: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Return the error response to a request."""
        with self.stream() as stream:
            stream.request_headers(**more)
            stream.request_body(body)
            return refusal(stream.receive())

    def exposition(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.metrics}/metrics").text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("epp"), "--router-mode", "kv") as made:
        made.mocker(*QUICK)
        made.mocker(*QUICK)
        yield made


@pytest.fixture(scope="module")
def picker(cluster: Cluster) -> Iterator[Picker]:
    with Picker(cluster, DYN_EPP_MAX_BODY_BYTES="100000") as made:
        cluster.wait_until(made.is_serving, "the picker has no worker")
        yield made


def test_full_duplex_request_gets_its_worker_and_its_body_back(cluster: Cluster, picker: Picker) -> None:
    body = json.dumps(chat(1)).encode()
    with picker.stream() as stream:
        stream.request_headers({WORKER: "17", "x-dp-rank": "3"})
        stream.request_body(body[:10], ends=False)
        stream.request_body(body[10:])
        answer = stream.receive()
        headers = mutated(answer.request_headers.response)
        passed = stream.receive().request_body.response.body_mutation.streamed_response
        assert passed.body == body
        assert headers[DESTINATION] == f"127.0.0.1:{cluster.port}"
        assert headers[WORKER] != "17", "a client does not choose the worker"
        assert "x-dp-rank" in answer.request_headers.response.header_mutation.remove_headers
        assert (headers[RANK], headers[MODE]) == ("0", "aggregated")
        assert stream.response_headers().WhichOneof("response") == "response_headers"
        stream.response_body(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}', ends=True)
    assert 'dynamo_epp_cached_tokens_sum{model="m"} 32' in picker.exposition()


def test_body_in_pieces_with_trailers_is_returned_whole_before_the_trailers(picker: Picker) -> None:
    body = b"x" * 99_999
    with picker.stream() as stream:
        stream.request_headers(path="/v1/files")
        for start in range(0, len(body), 1000):
            stream.request_body(body[start : start + 1000], ends=False)
        stream.send(request_trailers=ext_proc.HttpTrailers())
        assert DESTINATION in mutated(stream.receive().request_headers.response)
        passed = b""
        while (answer := stream.receive()).WhichOneof("response") == "request_body":
            part = answer.request_body.response.body_mutation.streamed_response
            assert not part.end_of_stream, "the trailers follow"
            passed += part.body
        assert (answer.WhichOneof("response"), passed == body) == ("request_trailers", True)


def test_compressed_request_is_refused_with_its_encoding(picker: Picker) -> None:
    status, answer, _ = picker.refused(gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert (status, answer["error"]["message"]) == (
        415,
        "content-encoding gzip: workers do not decompress request bodies",
    )


def test_gateway_request_reaches_the_picked_worker_and_streams(cluster: Cluster, picker: Picker) -> None:
    sidecar_port = free_port()
    cluster.run("frontend", "--http-host", "127.0.0.1", "--http-port", str(sidecar_port), "--router-mode", "direct")
    url = f"http://127.0.0.1:{sidecar_port}"

    def is_ready() -> bool:
        try:
            return len(httpx.get(f"{url}/health").json()["instances"]) == 2
        except httpx.TransportError:
            return False

    cluster.wait_until(is_ready, "the sidecar does not know both workers")
    body = chat(2, stream=True, nvext={"extra_fields": ["worker_id"]})
    with picker.stream() as stream:
        headers = stream.pick(body)
        stream.response_headers()
        with httpx.stream("POST", url + CHAT_PATH, json=body, headers=headers, timeout=30) as answer:
            assert answer.status_code == 200, answer.read()
            sent = b""
            for part in answer.iter_raw():
                passed = stream.response_body(part, ends=False).response_body.response
                sent += passed.body_mutation.streamed_response.body
        stream.response_body(b"", ends=True)
    events = [json.loads(line[6:]) for line in sent.decode().splitlines() if line.startswith("data: {")]
    workers = {
        event["nvext"]["worker_id"]["decode_worker_id"] for event in events if "worker_id" in (event.get("nvext") or {})
    }
    assert workers == {int(headers[WORKER])}
    assert sent.endswith(b"data: [DONE]\n\n")


def test_buffered_request_and_request_without_a_body(cluster: Cluster, picker: Picker) -> None:
    with picker.stream() as stream:
        stream.request_headers(mode=BUFFERED)
        assert not stream.receive().request_headers.response.HasField("header_mutation")
        stream.request_body(json.dumps(chat(3)).encode())
        assert mutated(stream.receive().request_body.response)[WORKER]
    with picker.stream() as stream:
        stream.request_headers(path="/v1/models", method="GET", ends=True)
        assert mutated(stream.receive().request_headers.response) == {DESTINATION: f"127.0.0.1:{cluster.port}"}


def test_decisions_equal_those_of_the_frontends_kv_router(cluster: Cluster, picker: Picker) -> None:
    queried = {"nvext": {"annotations": ["query_instance_id:"]}}

    def frontends(number: int) -> dict[str, int]:
        answer = cluster.post({**chat(number), **queried}).json()
        return answer["nvext"]["worker_id"]

    holders = sent_in_turn(cluster, range(100, 112))

    def agree(number: int) -> bool:
        found = frontends(number)
        headers = picker.pick(chat(number))
        ours = (headers[WORKER], headers[RANK])
        return ours == (str(found["decode_worker_id"]), str(found["decode_dp_rank"])) == (holders[number], "0")

    # Until the KV events of a prompt have arrived, both may choose any worker.
    cluster.wait_until(lambda: all(map(agree, holders)), "the frontend and the picker disagree")


def sent_in_turn(cluster: Cluster, numbers: range) -> dict[int, str]:
    """Send the prompts to the workers in turn, named in the requests; return the worker of each.

    The router would choose at random between workers without load that do not cache a prompt.
    """
    workers = [one["instance_id"] for one in cluster.http.get("/health").json()["instances"]]
    assert len(workers) == 2
    holders = {number: workers[number % 2] for number in numbers}
    for number, worker in holders.items():
        answer = cluster.post({**chat(number), "nvext": {"backend_instance_id": worker}})
        assert answer.status_code == 200, answer.text
    return {number: str(worker) for number, worker in holders.items()}


def other_apis(number: int) -> dict[str, dict[str, Any]]:
    """Return requests of other APIs with the prompt of `chat(number)`, by path."""
    text = chat(number)["messages"][0]["content"]
    return {
        "/v1/responses": {"model": "m", "input": text, "max_output_tokens": 4},
        "/prefix/v1/responses": {"model": "m", "input": [{"role": "user", "content": text}], "truncation": "auto"},
        "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4},
    }


def test_responses_and_messages_are_routed_by_their_prompts(cluster: Cluster, picker: Picker) -> None:
    holders = sent_in_turn(cluster, range(200, 208))

    def follows(number: int) -> bool:
        return {picker.pick(body, path=path)[WORKER] for path, body in other_apis(number).items()} == {holders[number]}

    cluster.wait_until(lambda: all(map(follows, holders)), "the worker that holds a prompt is not chosen")


def test_errors_have_the_form_of_their_api(picker: Picker) -> None:
    code, answer, _ = picker.refused(b"{}", path="/v1/messages")
    assert (code, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    body = json.dumps({"model": "absent", "input": "a"}).encode()
    code, answer, _ = picker.refused(body, path="/v1/responses")
    assert (code, answer["error"]["code"]) == (404, "model_not_found")


def test_requests_that_continue_a_stored_response_are_routed_by_their_own_items(picker: Picker) -> None:
    items = [{"type": "item_reference", "id": "msg_1"}, {"type": "function_call_output", "call_id": "c", "output": "1"}]
    assert picker.pick({"model": "m", "input": items, "previous_response_id": "resp_1"}, path="/v1/responses")[WORKER]


def test_embeddings_are_routed_by_load(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--router-mode", "kv") as cluster:
        for _ in range(2):
            cluster.run("cpu", "--model-name", "e", "--embedding-worker")
        with Picker(cluster) as picker:
            cluster.wait_until(picker.is_serving, "the picker has no worker")
            short, long = {"model": "e", "input": "a word"}, {"model": "e", "input": ["many other words"] * 40}
            path = "/v1/embeddings"

            def knows_both() -> bool:
                with picker.stream() as one, picker.stream() as other:
                    return one.pick(long, path=path)[WORKER] != other.pick(long, path=path)[WORKER]

            cluster.wait_until(knows_both, "one worker is unused")
            with picker.stream() as busy:
                taken = busy.pick(long, path=path)[WORKER]
                assert all(picker.pick(short, path=path)[WORKER] != taken for _ in range(6))
            code, answer, _ = picker.refused(json.dumps({"model": "e", "input": []}).encode(), path=path)
            assert (code, answer["error"]["param"]) == (400, "input")


def test_requests_to_text_workers_are_spread_by_their_number(tmp_path: Path) -> None:
    model = classifier(tmp_path / "judge")
    with Cluster(tmp_path, "--router-mode", "kv") as cluster:
        for _ in range(2):
            cluster.run("cpu", "--model-path", str(model), "--classify-worker")
        with Picker(cluster) as picker:
            body, path = {"model": "judge", "input": "What is it?"}, "/v1/classify"

            def knows_both() -> bool:
                return picker.is_serving() and len({picker.pick(body, path=path)[WORKER] for _ in range(4)}) == 2

            cluster.wait_until(knows_both, "one worker is unused")
            with picker.stream() as busy:
                taken = busy.pick(body, path=path)[WORKER]
                assert all(picker.pick(body, path=path)[WORKER] != taken for _ in range(4))
            assert {picker.pick(body, path=path)[WORKER] for _ in range(4)} > {taken}


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (json.dumps({**chat(4), "model": "x"}).encode(), 404, "served: m"),
        (b"{", 400, ""),
        (b"", 400, ""),
        (json.dumps({**chat(4), "max_tokens": 0}).encode(), 400, "Max tokens"),
        (b"x" * 100_001, 413, "100001 bytes: at most 100000"),
    ],
)
def test_bad_request_gets_an_immediate_response(picker: Picker, body: bytes, status: int, text: str) -> None:
    code, answer, headers = picker.refused(body)
    assert (code, headers["content-type"]) == (status, "application/json")
    assert text in answer["error"]["message"]


def test_body_that_does_not_arrive_ends_with_its_deadline(cluster: Cluster) -> None:
    with Picker(cluster, DYN_EPP_BODY_DEADLINE_SECS="1") as picker:
        cluster.wait_until(picker.is_serving, "the picker has no worker")
        with picker.stream() as stream:
            stream.request_headers()
            stream.request_body(b"{", ends=False)
            assert refusal(stream.receive())[0] == 504


def test_body_mode_without_bodies_is_a_clear_error(picker: Picker) -> None:
    with picker.stream() as stream:
        stream.request_headers(mode=STREAMED)
        code, answer, _ = refusal(stream.receive())
    assert code == 501
    assert "request_body_mode STREAMED: the endpoint picker requires FULL_DUPLEX_STREAMED" in answer["error"]["message"]


def test_message_that_is_none_ends_its_stream_with_a_status(picker: Picker) -> None:
    raw = picker.channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
    call = raw(iter([b"\xff\xff"]), timeout=30)
    with pytest.raises(grpc.RpcError):
        next(call)
    assert (call.code(), call.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "the message is no ProcessingRequest")


def test_gateways_candidates_restrict_the_choice(cluster: Cluster, picker: Picker) -> None:
    assert picker.pick(chat(5), subset=[f"127.0.0.1:{cluster.port}"])[WORKER]
    code, answer, headers = picker.refused(json.dumps(chat(5)).encode(), subset=["10.9.9.9:8000"])
    assert (code, headers["retry-after"]) == (503, "1")
    assert "10.9.9.9:8000" in answer["error"]["message"]


def test_health_service_reports_probed_services(picker: Picker) -> None:
    assert [picker.status(name) for name in ("", "inference-extension", "liveness", "readiness")] == [SERVING] * 4
    check = grpc.insecure_channel(f"127.0.0.1:{picker.health}").unary_unary(f"/{HEALTH_SERVICE}/Check")
    with pytest.raises(grpc.RpcError) as caught:
        check(HEALTH_CLASSES["HealthCheckRequest"](service="other").SerializeToString(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_overload_and_queue(cluster: Cluster, tmp_path: Path) -> None:
    """One request per worker is admitted; the next one waits, and one more is refused."""
    with (
        Picker(cluster, "--max-inflight-requests", "1", "--router-queue-threshold", "0.001") as picker,
        contextlib.ExitStack() as streams,
    ):
        cluster.wait_until(picker.is_serving, "the picker has no worker")
        first, second, *others = (streams.enter_context(picker.stream()) for _ in range(4))
        busy = [stream.pick(chat(number)) for number, stream in ((6, first), (7, second))]
        assert len({headers[WORKER] for headers in busy}) == 2
        for stream in others:
            stream.request_headers()
            stream.request_body(json.dumps(chat(8)).encode())
        with ThreadPoolExecutor() as threads:
            answers = [threads.submit(stream.receive) for stream in others]
            (refused,), (waiting,) = wait(answers, DEADLINE_S, FIRST_COMPLETED)
            code, body, headers = refusal(refused.result())
            assert (code, headers["retry-after"]) == (429, "1")
            assert "DYN_EPP_MAX_INFLIGHT_REQUESTS" in body["error"]["message"]
            first.close()
            admitted = mutated(waiting.result(DEADLINE_S).request_headers.response)
        assert admitted[WORKER] == busy[0][WORKER], "the worker of the request that ended"


def test_secure_serving_presents_a_certificate_by_default(cluster: Cluster) -> None:
    with Picker(cluster, secure=True) as picker:
        cluster.wait_until(picker.is_serving, "the picker has no worker")
        certificate = ssl.get_server_certificate(("127.0.0.1", picker.port)).encode()
        options = [("grpc.ssl_target_name_override", "localhost")]
        credentials = grpc.ssl_channel_credentials(certificate)
        with (
            grpc.secure_channel(f"127.0.0.1:{picker.port}", credentials, options) as channel,
            GatewayStream(channel) as one,
        ):
            assert one.pick(chat(10))[WORKER]


def test_replicas_share_active_requests(cluster: Cluster) -> None:
    with Picker(cluster, "--router-replica-sync") as one, Picker(cluster, "--router-replica-sync") as other:
        for picker in (one, other):
            cluster.wait_until(picker.is_serving, "the picker has no worker")

        def avoids() -> bool:
            """Open another stream: a message that is sent before the replica has subscribed is lost."""
            with one.stream() as stream:
                taken = stream.pick(chat(20, words=200))[WORKER]
                for _ in range(20):
                    if all(other.pick(chat(21 + number, words=200))[WORKER] != taken for number in range(6)):
                        return True
                    time.sleep(0.05)
            return False

        cluster.wait_until(avoids, "the replica does not count the other's request")


def test_stop_reports_not_serving_before_streams_end(cluster: Cluster) -> None:
    with Picker(cluster, DYN_EPP_GRACEFUL_SHUTDOWN_PROPAGATION_SECS="6") as picker:
        cluster.wait_until(picker.is_serving, "the picker has no worker")
        with picker.stream() as stream:
            stream.pick(chat(30))
            picker.process.terminate()
            wait_until(lambda: picker.status() == NOT_SERVING, "the picker still serves")
            assert stream.response_headers().WhichOneof("response") == "response_headers"
            assert picker.pick(chat(31))[WORKER], "gateways that have not noticed are still served"
        assert picker.process.wait(DEADLINE_S) == 0


def test_dying_workers(tmp_path: Path) -> None:
    """Requests go to the workers that live; without any they get an error."""
    with Cluster(tmp_path, "--router-mode", "kv") as cluster, Picker(cluster) as picker:
        assert picker.status() == NOT_SERVING
        assert picker.status("liveness") == SERVING
        assert picker.refused(json.dumps(chat(1)).encode())[0] == 404
        workers = [cluster.mocker(*QUICK), cluster.mocker(*QUICK)]
        cluster.wait_until(picker.is_serving, "the picker has no worker")
        cluster.wait_until(
            lambda: len({picker.pick(chat(one))[WORKER] for one in range(8)}) == 2, "one worker is unused"
        )
        workers[0].send_signal(signal.SIGTERM)
        workers[0].wait(DEADLINE_S)
        cluster.wait_until(lambda: len({picker.pick(chat(one))[WORKER] for one in range(8)}) == 1, "it is still chosen")
        workers[1].send_signal(signal.SIGTERM)
        workers[1].wait(DEADLINE_S)
        cluster.wait_until(lambda: not picker.is_serving(), "a picker without workers serves")
        code, answer, headers = picker.refused(json.dumps(chat(1)).encode())
        assert (code, headers["retry-after"]) == (503, "1")
        assert "has no worker at the moment" in answer["error"]["message"]


def test_disaggregated_request_names_both_workers(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--router-mode", "kv") as cluster:
        prefill = cluster.run("mocker", "--model-name", "m", *QUICK, "--disaggregation-mode", "prefill")
        cluster.worker("mocker", *QUICK, "--disaggregation-mode", "decode")
        with Picker(cluster, "--enforce-disagg") as picker:
            cluster.wait_until(picker.is_serving, "the picker has no workers")
            headers = picker.pick(chat(1))
            assert headers[MODE] == "disaggregated"
            assert headers[PREFILL] != headers[WORKER]
            assert (headers[RANK], headers[PREFILL_RANK]) == ("0", "0")
            queried = {**chat(1), "nvext": {"annotations": ["query_instance_id:"]}}

            def frontends() -> tuple[str, str]:
                """Return the choice of the frontend, which may find the workers later than the picker."""
                answer = cluster.post(queried).json().get("nvext", {}).get("worker_id", {})
                return str(answer.get("prefill_worker_id")), str(answer.get("decode_worker_id"))

            cluster.wait_until(
                lambda: frontends() == (headers[PREFILL], headers[WORKER]), "the frontend and the picker disagree"
            )
            prefill.send_signal(signal.SIGTERM)
            prefill.wait(DEADLINE_S)
            cluster.wait_until(lambda: not picker.is_serving(), "a picker without prefill workers serves")
            assert picker.refused(json.dumps(chat(1)).encode())[0] == 503


def test_stream_of_a_gateway_that_disappears_releases_its_worker(cluster: Cluster) -> None:
    with Picker(cluster, "--router-queue-threshold", "0.001") as picker:
        cluster.wait_until(picker.is_serving, "the picker has no worker")
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{picker.port}", options) as gone:
            for number in (40, 41):
                GatewayStream(gone).pick(chat(number))
        assert picker.pick(chat(42))[WORKER], "it would wait while both workers are busy"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DYN_TLS_CERT_PATH": "/absent.pem", "DYN_TLS_KEY_PATH": "/absent.key"}, "--tls-cert-path /absent.pem: No such file"),
        ({"DYN_FILE_KV": "/proc/self/absent", "DYN_SECURE_SERVING": "false"}, "DYN_FILE_KV='/proc/self/absent': cannot create"),
        ({"DYN_EPP_MODE": "standalone"}, "DYN_EPP_INFERENCE_POOL_NAME): required by DYN_EPP_MODE=standalone"),
        ({"DYN_DISCOVERY_BACKEND": "kubernetes"}, "POD_NAME: required by --discovery-backend kubernetes"),
    ],
)  # fmt: skip
def test_setting_that_cannot_be_used_is_one_line(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynamo.epp", "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in {1, 2}
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("error:")]
    assert message in line
    assert "Traceback" not in done.stderr
