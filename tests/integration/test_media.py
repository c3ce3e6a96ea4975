"""Images, speech and videos: OpenAI's client, a frontend and the example's worker, each a process of its own."""

import base64
import io
import json
import wave
from collections.abc import Iterator

import openai
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.integration.scripts import running
from tests.websocket_line import Line

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("media")
    with Cluster(folder, "--discovery-backend", "file") as cluster, running(folder) as scripts:
        scripts.start("media/worker.py")
        wait_until(cluster.is_live, "the frontend never came up")
        wait_until(lambda: len(cluster.http.get("/v1/models").json()["data"]) == 4, "the models never appeared")
        yield cluster


def test_images_are_generated_and_edited(cluster: Cluster) -> None:
    client = cluster.openai()
    drawn = client.images.generate(model="square", prompt="red square", size="8x8", n=2, response_format="b64_json")
    assert drawn.data is not None
    assert len(drawn.data) == 2
    picture = base64.b64decode(drawn.data[0].b64_json or "")
    assert picture.startswith(b"BM")
    edited = client.images.edit(model="square", image=("a.bmp", picture, "image/bmp"), prompt="blue one")
    assert edited.data is not None
    assert base64.b64decode(edited.data[0].b64_json or "")[54:57] == bytes((255, 0, 0))
    with pytest.raises(openai.BadRequestError):
        client.images.generate(model="square", prompt="loud")
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model="morse", prompt="red")


def test_speech_is_generated(cluster: Cluster) -> None:
    client = cluster.openai()
    spoken = client.audio.speech.create(model="morse", voice="any", input="one two three", response_format="wav")
    assert spoken.response.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(spoken.read())) as sound:
        assert sound.getnframes() == 2400
    with client.audio.speech.with_streaming_response.create(
        model="morse", voice="any", input="one two", stream_format="sse"
    ) as streamed:
        events = [json.loads(line.removeprefix("data: ")) for line in streamed.iter_lines() if line]
    assert [one["type"] for one in events] == ["speech.audio.delta"] * 3 + ["speech.audio.done"]
    assert cluster.metric("dynamo_frontend_requests_total", endpoint="audios", status="success") == 2


def test_video_generation_reports_progress(cluster: Cluster) -> None:
    whole = cluster.http.post("/v1/videos", json={"model": "film", "prompt": "x"}).json()
    assert (whole["status"], whole["data"][0]["url"]) == ("completed", "http://localhost/film.mp4")
    streamed = cluster.http.post("/v1/videos", json={"model": "film", "prompt": "x", "seconds": 2, "stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    assert [json.loads(one)["progress"] for one in events] == [0, 50, 100]


def test_realtime_session_streams_in_both_directions(cluster: Cluster) -> None:
    line = Line(cluster.port, "/v1/realtime")
    assert line.receive_event()["type"] == "session.created"
    line.send_event({"type": "session.update", "session": {"type": "realtime", "model": "parrot"}})
    assert line.receive_event()["type"] == "session.updated"
    for sound in ("AAAA", "A" * 1_000_000):
        line.send_event({"type": "input_audio_buffer.append", "audio": sound})
        assert line.receive_event()["delta"] == sound
    line.send_event({"type": "input_audio_buffer.commit"})
    assert line.receive_event() == {"type": "response.done"}
    line.close()
    wait_until(
        lambda: cluster.metric("dynamo_frontend_requests_total", endpoint="realtime", status="success") == 1,
        "the conversation was never closed",
    )


def test_every_media_route_is_in_the_openapi_document(cluster: Cluster) -> None:
    paths = cluster.http.get("/openapi.json").json()["paths"]
    for path in (
        "images/generations",
        "images/edits",
        "audio/speech",
        "videos",
        "videos/stream",
        "embeddings",
        "rerank",
    ):
        assert set(paths[f"/v1/{path}"]["post"]["responses"]) >= {"200", "400", "404", "503"}
