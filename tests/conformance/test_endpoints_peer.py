"""Embeddings, media and native generation: both frontends send a worker the same requests, and return the same."""

import json
import os

import pytest
from benchmarks.peer import peer_python
from tests.cluster.peers import PeerCluster, RecordedRequests, require_peer
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


def output(token_id, **more):
    top = [[{"rank": 1, "token_id": token_id, "logprob": -0.5}]]
    return {"token_ids": [token_id], "index": 0, "log_probs": [-0.5], "top_logprobs": top, **more}


SPOKEN = (output(5), output(6, finish_reason="length", engine_data={"kv_transfer_params": {"a": 1}}))
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
    "no-such-model": (EMBED, {"model": "no-such-model", "input": "a"}, 404),
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


class EndpointPeers(PeerCluster):
    """Both frontends with a released worker that records requests and sends prepared responses."""

    def __init__(self, folder):
        super().__init__(folder, "--router-mode", "round-robin", variables=SWITCHES)
        self.records, self.answers = RecordedRequests(folder / "records.jsonl"), folder / "answers.json"
        self.answers.write_text("[]")
        self.run([peer_python(), WORKER, DEMO_MODEL, str(self.records.path), str(self.answers)])
        for name in self.ports:
            self.wait_until(lambda name=name: len(self.models(name)) == 9, f"{name} was not ready", READY_S)

    def post(self, name, path, body):
        return self.request(self.ports[name], "POST", path, body)

    def exchange(self, name, path, body, answers):
        """Return the requests that the worker received and the response of the frontend."""
        self.answers.write_text(json.dumps(list(answers)))
        before = self.records.count()
        response = self.post(name, path, body)
        assert response.status == 200, response.body
        requests = [settled(one) for one in self.records.since(before)]
        kind = response.content_type
        return requests, kind.partition(";")[0], response.json if "json" in kind else response.body


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    require_peer()
    with EndpointPeers(tmp_path_factory.mktemp("endpoints")) as peers:
        yield peers


def settled(request):
    """Return a request without the checksum of its model's card, which differs between implementations."""
    return {name: value for name, value in request.items() if name != "mdc_sum"}


@pytest.mark.parametrize("name", CASES)
def test_both_frontends_send_the_same_requests_and_responses(peers, name):
    assert peers.exchange("ours", *CASES[name]) == peers.exchange("theirs", *CASES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_both_frontends_refuse_the_same_requests(peers, name):
    path, body, status = REFUSED[name]
    assert [peers.post(implementation, path, body).status for implementation in ("ours", "theirs")] == [status] * 2


@pytest.mark.parametrize("name", ["a text", "classes", "ranked", "an image", "a sound", "a film", "tokens"])
def test_both_frontends_return_the_same_status_for_a_failed_worker(peers, name):
    path, body, _ = CASES[name]
    peers.answers.write_text('["fail"]')
    assert [peers.post(implementation, path, body).status for implementation in ("ours", "theirs")] == [400, 400]


UPDATE = {"type": "session.update", "session": {"type": "realtime", "model": "talk", "output_modalities": ["text"]}}
UPDATED = {"type": "session.updated", "event_id": "e", "session": {"type": "realtime", "model": "talk"}}
TALKS = {
    "a turn": [UPDATE, {"type": "input_audio_buffer.append", "audio": "AAAA"}, {"type": "input_audio_buffer.commit"}],
    "a wrong model, then a right one": [{**UPDATE, "session": {"type": "realtime", "model": "no-such-model"}}, UPDATE],
    "another model later": [UPDATE, {**UPDATE, "session": {"type": "realtime", "model": "other"}}],
    "no event": [["nothing"], UPDATE],
}


@pytest.mark.parametrize("name", TALKS)
def test_both_frontends_return_the_same_conversation(peers, name):
    peers.answers.write_text(json.dumps([UPDATED]))
    received = []
    for implementation in ("ours", "theirs"):
        before = peers.records.count()
        line = Line(peers.ports[implementation], "/v1/realtime")
        reported = [line.receive_event()]
        for event in TALKS[name]:
            line.send_event(event)
            reported.append(line.receive_event())
        line.close()
        requested = peers.records.since(before)
        received.append(
            (requested, [{key: value for key, value in one.items() if key != "event_id"} for one in reported])
        )
    assert received[0] == received[1]
