"""Embeddings, media and native generation: our frontend asks a released worker, and tells a client, what theirs does."""

import http.client
import json
import os
import subprocess
import sys
import time
from contextlib import closing

import pytest
from benchmarks.peer import is_ready, peer_home, peer_python
from benchmarks.stacks import HOST, free_port, stack_environment
from tests.websocket_line import Line

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.conformance

READY_S = 90.0
WORKER = os.path.join(os.path.dirname(__file__), "peer_endpoints.py")
SWITCHES = {"DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1", "DYN_SGLANG_ENABLE_GENERATE": "1"}
EMBED, CLASSIFY, POOL, RANK = "/v1/embeddings", "/v1/classify", "/v1/pooling", "/v1/rerank"
IMAGES, EDITS, SPEECH, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/audio/speech", "/v1/videos"
FRAMES, VLLM, SGLANG = "/v1/videos/stream", "/inference/v1/generate", "/generate"

VECTOR = "AACAPwAAIEAAAEDA"  # 1, 2.5, -3.
PACKED = {"embeddings": [VECTOR], "prompt_tokens": 5, "total_tokens": 6}
USAGE = {"prompt_tokens": 3, "total_tokens": 3}
LISTED = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [1.5, 2.5]}],
    "model": "w",
    "usage": USAGE,
}
CLASSES = {
    "id": "c-1",
    "object": "list",
    "created": 1,
    "model": "w",
    "data": [{"index": 0, "label": "x", "probs": [0.25, 0.75], "num_classes": 2}],
    "usage": {**USAGE, "completion_tokens": 0},
}
POOLED = {**CLASSES, "data": [{"index": 0, "object": "pooling", "data": VECTOR, "shape": [3]}]}
RANKED = [{"score": 0.5, "index": 0, "document": "d"}, {"score": 0.25, "index": 1}]
IMAGE = {"created": 1, "data": [{"b64_json": "AAAA"}]}
COMMON = {"id": "i", "model": "w", "status": "completed", "progress": 100, "created": 1}
SOUND = {**COMMON, "object": "audio.speech", "data": [{"output_format": "wav", "b64_json": "UklGRg=="}]}
FILM = {**COMMON, "object": "video", "data": [{"output_format": "mp4", "url": "http://v"}]}
PICTURE = {**COMMON, "object": "video", "data": [{"output_format": "jpeg", "b64_json": "UklGRg=="}]}
LINK = {**SOUND, "data": [{"output_format": "wav", "url": "http://x"}]}


def said(token_id, **more):
    top = [[{"rank": 1, "token_id": token_id, "logprob": -0.5}]]
    return {"token_ids": [token_id], "index": 0, "log_probs": [-0.5], "top_logprobs": top, **more}


SPOKEN = (said(5), said(6, finish_reason="length", engine_data={"kv_transfer_params": {"a": 1}}))
OWN = {"output_ids": [5], "meta_info": {"id": "r", "finish_reason": {"type": "length"}}}
FRAMED = {"token_ids": [5], "index": 0, "finish_reason": "length", "engine_data": {"sglang_response": OWN}}

CASES = {
    "a text": (EMBED, {"model": "tokens", "input": "Hello there"}, [PACKED]),
    "texts": (EMBED, {"model": "tokens", "input": ["Hello there"], "encoding_format": "base64"}, [PACKED]),
    "ids": (EMBED, {"model": "tokens", "input": [5, 6], "dimensions": 2, "user": "u"}, [PACKED]),
    "lists of ids": (EMBED, {"model": "tokens", "input": [[5, 6]], "truncate_prompt_tokens": 1}, [PACKED]),
    "annotated": (EMBED, {"model": "tokens", "input": "a", "nvext": {"annotations": ["x"]}}, [PACKED]),
    "a text as it is": (EMBED, {"model": "texts", "input": "Hello", "user": "u", "dimensions": 3}, [LISTED]),
    "classes": (CLASSIFY, {"model": "classes", "input": "hi"}, [CLASSES]),
    "classes of several": (CLASSIFY, {"model": "classes", "input": ["a", "b"], "priority": 2}, [CLASSES, CLASSES]),
    "pooled": (POOL, {"model": "classes", "input": "hi", "encoding_format": "base64", "task": "embed"}, [POOLED]),
    "pooled bytes": (POOL, {"model": "classes", "input": "hi", "encoding_format": "bytes_only"}, [POOLED]),
    "ranked": (RANK, {"model": "ranks", "query": "q", "documents": ["d", "e"]}, [RANKED]),
    "the best": (RANK, {"model": "ranks", "query": "q", "documents": ["d"], "top_n": 1, "user": "u"}, [RANKED]),
    "an image": (IMAGES, {"model": "images", "prompt": "cat"}, [IMAGE]),
    "images": (IMAGES, {"model": "images", "prompt": "c", "n": 2, "size": "1x1", "foo": 1}, [IMAGE, IMAGE]),
    "an edit": (EDITS, {"model": "images", "prompt": "c", "input_reference": "http://x/a.png"}, [IMAGE]),
    "a sound": (SPEECH, {"model": "sounds", "input": "hi", "voice": "v"}, [SOUND, SOUND]),
    "a sound, chosen": (SPEECH, {"model": "sounds", "input": "hi", "response_format": "pcm", "speed": 1.5}, [SOUND]),
    "a sound of pulses": (SPEECH, {"model": "sounds", "input": "hi", "response_format": "pcm"}, [SOUND]),
    "a sound of waves": (SPEECH, {"model": "sounds", "input": "hi", "response_format": "wav"}, [SOUND]),
    "a sound in layers": (SPEECH, {"model": "sounds", "input": "hi", "response_format": "mp3"}, [SOUND]),
    "a slow sound": (SPEECH, {"model": "sounds", "input": "hi", "speed": 0.5}, [SOUND]),
    "a sound at its speed": (SPEECH, {"model": "sounds", "input": "hi", "speed": 1.0}, [SOUND]),
    "a sound in base64": (SPEECH, {"model": "sounds", "input": "hi", "data_source": "b64_json"}, [SOUND]),
    "a stream of sound": (
        SPEECH,
        {"model": "sounds", "input": "hi", "response_format": "mp3", "stream": True},
        [SOUND],
    ),
    "a sound, extended": (SPEECH, {"model": "sounds", "input": "hi", "nvext": {"cfg_scale": 1.5}}, [SOUND]),
    "a link": (SPEECH, {"model": "sounds", "input": "hi", "data_source": "url"}, [LINK]),
    "a film": (VIDEOS, {"model": "films", "prompt": "c", "seconds": 4, "nvext": {"fps": 3}}, [FILM]),
    "a film in steps": (VIDEOS, {"model": "films", "prompt": "c", "stream": True}, [FILM, FILM]),
    "frames": (FRAMES, {"model": "films", "prompt": "c"}, [PICTURE, PICTURE]),
    "tokens and how likely": (VLLM, {"token_ids": [1], "sampling_params": {"logprobs": 1}, "request_id": "r"}, SPOKEN),
    "tokens": (VLLM, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}, "request_id": "r"}, SPOKEN),
    "sglang's": (SGLANG, {"input_ids": [1, 2], "stream": True, "rid": "r", "foo": 1}, [FRAMED]),
}
REFUSED = {
    "mixed": (EMBED, {"model": "tokens", "input": ["a", 5]}, 400),
    "no input": (EMBED, {"model": "tokens"}, 400),
    "no format": (EMBED, {"model": "tokens", "input": "a", "encoding_format": "bytes"}, 400),
    "nobody": (EMBED, {"model": "nobody", "input": "a"}, 404),
    "somebody else": (EMBED, {"model": "images", "input": "a"}, 404),
    "dimensions": (POOL, {"model": "classes", "input": "a", "dimensions": 3}, 400),
    "no query": (RANK, {"model": "ranks", "query": " ", "documents": ["d"]}, 400),
    "no documents": (RANK, {"model": "ranks", "query": "q", "documents": []}, 400),
    "none of them": (RANK, {"model": "ranks", "query": "q", "documents": ["d"], "top_n": 0}, 400),
    "no prompt": (IMAGES, {"model": "images"}, 400),
    "nothing to edit": (EDITS, {"model": "images", "prompt": "c"}, 400),
    "too fast": (SPEECH, {"model": "sounds", "input": "hi", "speed": 9}, 400),
    "no tokens": (VLLM, {"token_ids": [], "sampling_params": {}}, 400),
    "text": (SGLANG, {"text": "hi", "stream": True}, 400),
}


class Stand:
    """Both frontends, and the worker behind them."""

    def __init__(self, home):
        self.ports = {"ours": free_port(), "theirs": free_port()}
        self.records, self.answers = home / "records.jsonl", home / "answers.json"
        self.records.touch()
        self.answers.write_text("[]")
        (home / "discovery").mkdir()
        self.home = home
        self.processes = []
        for name, python in (("ours", sys.executable), ("theirs", peer_python())):
            listen = ["--http-host", HOST, "--http-port", str(self.ports[name]), "--router-mode", "round-robin"]
            self.start([python, "-m", "dynamo.frontend", *listen])
        self.start([peer_python(), WORKER, DEMO_MODEL, str(self.records), str(self.answers)])
        for name in self.ports:
            self.wait(name)

    def start(self, command):
        env = stack_environment(str(self.home), dict(os.environ)) | SWITCHES
        with open(self.home / f"{len(self.processes)}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(command, env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def wait(self, name):
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            try:
                _, _, body = self.ask(name, "GET", "/v1/models")
                if len(json.loads(body)["data"]) == 9:
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.1)
        pytest.fail(f"{name} was not ready in {READY_S:g} s")

    def ask(self, name, method, path, body=None):
        with closing(http.client.HTTPConnection(HOST, self.ports[name], timeout=30)) as connection:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.getheader("content-type"), response.read()

    def told(self, name, path, body, answers):
        """What the worker was asked, and what the client was told."""
        self.answers.write_text(json.dumps(list(answers)))
        before = len(self.records.read_text().splitlines())
        status, kind, told = self.ask(name, "POST", path, body)
        assert status == 200, told
        asked = [json.loads(line) for line in self.records.read_text().splitlines()[before:]]
        return [settled(one) for one in asked], kind.partition(";")[0], json.loads(told) if "json" in kind else told

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    stand = Stand(tmp_path_factory.mktemp("endpoints"))
    yield stand
    stand.stop()


def settled(request):
    """A request without the sum of its model's card, which each house makes in its own way."""
    return {name: value for name, value in request.items() if name != "mdc_sum"}


@pytest.mark.parametrize("name", CASES)
def test_a_worker_is_asked_and_a_client_is_told_the_same(stand, name):
    assert stand.told("ours", *CASES[name]) == stand.told("theirs", *CASES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_is_refused(stand, name):
    path, body, status = REFUSED[name]
    assert [stand.ask(house, "POST", path, body)[0] for house in ("ours", "theirs")] == [status] * 2


@pytest.mark.parametrize("name", ["a text", "classes", "ranked", "an image", "a sound", "a film", "tokens"])
def test_a_worker_that_fails_is_told_with_the_same_status(stand, name):
    path, body, _ = CASES[name]
    stand.answers.write_text('["fail"]')
    assert [stand.ask(house, "POST", path, body)[0] for house in ("ours", "theirs")] == [400, 400]


UPDATE = {"type": "session.update", "session": {"type": "realtime", "model": "talk", "output_modalities": ["text"]}}
UPDATED = {"type": "session.updated", "event_id": "e", "session": {"type": "realtime", "model": "talk"}}
TALKS = {
    "a turn": [UPDATE, {"type": "input_audio_buffer.append", "audio": "AAAA"}, {"type": "input_audio_buffer.commit"}],
    "a wrong model, then a right one": [{**UPDATE, "session": {"type": "realtime", "model": "nobody"}}, UPDATE],
    "another model later": [UPDATE, {**UPDATE, "session": {"type": "realtime", "model": "other"}}],
    "no event": [["nothing"], UPDATE],
}


@pytest.mark.parametrize("name", TALKS)
def test_a_conversation_is_the_same(stand, name):
    stand.answers.write_text(json.dumps([UPDATED]))
    heard = []
    for house in ("ours", "theirs"):
        before = len(stand.records.read_text().splitlines())
        line = Line(stand.ports[house], "/v1/realtime")
        told = [line.hear()]
        for event in TALKS[name]:
            line.say(event)
            told.append(line.hear())
        line.close()
        asked = [json.loads(record) for record in stand.records.read_text().splitlines()[before:]]
        heard.append((asked, [{key: value for key, value in one.items() if key != "event_id"} for one in told]))
    assert heard[0] == heard[1]
