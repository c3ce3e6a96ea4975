"""The routes of embeddings, classification, pooling and reranking, with workers in the same process."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.relays import Handler, open_relays

from dynamo.core.errors import InvalidArgument
from dynamo.http.routes.embeddings import add
from dynamo.model_card.types import ModelType
from dynamo.serving.embeddings import from_base64, to_base64

POOLED = ModelType.Classify | ModelType.Pooling
LIST = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [1, 2.5, -3]}],
    "model": "theirs",
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}


def says(*items: Any) -> Handler:
    async def handler(request: Any) -> AsyncIterator[Any]:
        for one in items:
            if isinstance(one, Exception):
                raise one
            yield one

    return handler


async def lengths(request: Any) -> AsyncIterator[Any]:
    """Each input's number of tokens is its vector."""
    found = [len(ids) for ids in request["token_ids"]]
    yield {"embeddings": [to_base64([n, 0.5]) for n in found], "prompt_tokens": sum(found), "total_tokens": sum(found)}


async def test_embedding_texts_are_tokenized_for_a_token_worker(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await relays.serve("e", ModelType.Embedding, lengths, directory=str(model_dir))
        answer = await relays.send_request("/v1/embeddings", {"model": "e", "input": ["the router", "a"]})
        assert answer.status == 200
        (first, second), requested = answer.json["data"], relays.received_requests[0]
        assert [len(ids) for ids in requested["token_ids"]] == [first["embedding"][0], second["embedding"][0]]
        assert (first["index"], second["index"], answer.json["model"]) == (0, 1, "e")
        assert answer.json["usage"]["prompt_tokens"] == sum(map(len, requested["token_ids"]))
        assert requested["dimensions"] is None
        assert "encoding_format" not in requested
        assert "embedding_latency_seconds_count" in relays.registry.render()


async def test_embedding_tokens_and_options_are_forwarded_unchanged(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await relays.serve("e", ModelType.Embedding, lengths, directory=str(model_dir))
        fields = {"dimensions": 2, "encoding_format": "base64", "truncate_prompt_tokens": 4, "user": "u"}
        nvext = {"annotations": ["x"]}
        answer = await relays.send_request(
            "/v1/embeddings", {"model": "e", "input": [[5, 6], [7]], "nvext": nvext, **fields}
        )
        assert [list(from_base64(one["embedding"])) for one in answer.json["data"]] == [[2, 0.5], [1, 0.5]]
        requested = relays.received_requests[0]
        assert (requested["token_ids"], requested["annotations"], requested["model"]) == ([[5, 6], [7]], ["x"], "e")
        assert (requested["dimensions"], requested["encoding_format"], requested["truncate_prompt_tokens"]) == (
            2,
            "base64",
            4,
        )


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"input": []}, 400, "input"),
    ({"input": ["a", 5]}, 400, "input"),
    ({"input": {"a": 1}}, 400, "input"),
    ({"input": ["a"] * 2049}, 400, "input"),
    ({"input": [1 << 30]}, 400, "input"),
    ({"input": [-1]}, 400, "input"),
    ({"input": [[5], []]}, 400, "input[1]"),
    ({"input": ""}, 400, "input"),
    ({"input": None}, 400, "input"),
    ({"dimensions": 0}, 400, "dimensions"),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
    ({"encoding_format": "bytes"}, 400, "encoding_format"),
    ({"surprise": 1}, 400, "surprise"),
    ({"nvext": {"surprise": 1}}, 400, "nvext.surprise"),
    ({"model": None}, 400, "model"),
    ({"model": "no-such-model"}, 404, "model"),
]


async def test_invalid_embedding_field_is_refused_by_name(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await relays.serve("e", ModelType.Embedding, lengths, directory=str(model_dir))
        for fields, status, param in WRONG:
            answer = await relays.send_request("/v1/embeddings", {"model": "e", "input": "a", **fields})
            assert (answer.status, answer.json["error"]["param"]) == (status, param), fields
        assert not relays.received_requests


async def test_text_worker_receives_the_request_and_both_encodings_are_returned() -> None:
    async with open_relays(add) as relays:
        await relays.serve("e", ModelType.Embedding, says(LIST))
        plain = await relays.send_request("/v1/embeddings", {"model": "e", "input": "Hi", "user": "u"})
        packed = await relays.send_request("/v1/embeddings", {"model": "e", "input": "Hi", "encoding_format": "base64"})
        assert plain.json == {**LIST, "data": [{"object": "embedding", "index": 0, "embedding": [1, 2.5, -3]}]}
        assert list(from_base64(packed.json["data"][0]["embedding"])) == [1, 2.5, -3]
        assert relays.received_requests == [
            {"model": "e", "input": "Hi", "user": "u"},
            {"model": "e", "input": "Hi", "encoding_format": "base64"},
        ]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ((), 503),
        (({"object": "list"},), 500),
        ((LIST, LIST), 500),
        (({**LIST, "data": [{"embedding": "no base64"}]},), 500),
        (({**LIST, "data": [{"embedding": to_base64([float("inf")])}]},), 500),
        (({**LIST, "data": [{"embedding": None}]},), 500),
        ((ValueError("secret"),), 400),
        ((InvalidArgument("this one"),), 400),
        ((RuntimeError("secret"),), 500),
    ],
)
async def test_invalid_embedding_worker_response_is_an_error(message: tuple[Any, ...], status: int) -> None:
    async with open_relays(add) as relays:
        await relays.serve("e", ModelType.Embedding, says(*message))
        answer = await relays.send_request("/v1/embeddings", {"model": "e", "input": "Hi"})
        assert answer.status == status
        assert "secret" not in answer.json["message"]


async def test_large_embedding_response_is_returned_completely() -> None:
    async with open_relays(add) as relays:
        vector = [float(n) for n in range(20000)]
        await relays.serve("e", ModelType.Embedding, says({**LIST, "data": [{"embedding": to_base64(vector)}]}))
        answer = await relays.send_request("/v1/embeddings", {"model": "e", "input": "Hi"})
        assert answer.json["data"][0]["embedding"] == vector


async def test_classify_and_pooling_return_the_worker_response_unchanged() -> None:
    message = {
        "id": "c-1",
        "object": "list",
        "data": [{"index": 0, "label": "x", "probs": [0.1, 0.9]}],
        "usage": {"prompt_tokens": 3},
    }
    async with open_relays(add) as relays:
        await relays.serve("c", POOLED, says(message, message))
        for path, more in (("/v1/classify", {}), ("/v1/pooling", {"encoding_format": "float"})):
            answer = await relays.send_request(path, {"model": "c", "input": ["a", "b"]})
            assert [one["label"] for one in answer.json["data"]] == ["x", "x"]
            assert answer.json["usage"] == {"prompt_tokens": 6}
            assert relays.received_requests.pop() == {"model": "c", "input": ["a", "b"], "priority": 0, **more}
        refused = await relays.send_request("/v1/pooling", {"model": "c", "input": "a", "dimensions": 3})
        assert refused.json["message"] == "dimensions is currently not supported"


async def test_pooling_returns_embeddings_as_bytes() -> None:
    entries = [{"index": n, "data": to_base64([n, 2.5]), "shape": [2]} for n in range(2)]
    message = {"id": "p-1", "created": 1, "model": "c", "data": entries, "usage": {"prompt_tokens": 3}}
    async with open_relays(add) as relays:
        await relays.serve("c", POOLED, says(message))
        only = await relays.send_request(
            "/v1/pooling", {"model": "c", "input": ["a", "b"], "encoding_format": "bytes_only"}
        )
        assert only.headers["content-type"] == "application/octet-stream"
        assert only.body == bytes.fromhex("00000000000020400000803f00002040")
        both = await relays.send_request("/v1/pooling", {"model": "c", "input": ["a", "b"], "encoding_format": "bytes"})
        reported = json.loads(both.headers["metadata"])
        assert [both.body[one["start"] : one["end"]] for one in reported["data"]] == [only.body[:8], only.body[8:]]
        wrong = {"model": "c", "input": "a", "encoding_format": "bytes", "embed_dtype": "float16"}
        assert (await relays.send_request("/v1/pooling", wrong)).status == 500


async def test_rerank_returns_the_worker_ranking_unchanged() -> None:
    ranked = [{"score": 0.5, "index": 1, "document": "e"}, {"score": 0.25, "index": 0}]
    async with open_relays(add) as relays:
        await relays.serve("r", ModelType.Rerank, says(ranked))
        answer = await relays.send_request(
            "/v1/rerank", {"model": "r", "query": "q", "documents": ["d", "e"], "user": "u"}
        )
        assert answer.json == ranked
        assert relays.received_requests == [
            {"model": "r", "query": "q", "documents": ["d", "e"], "return_documents": True}
        ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": " "}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["d"] * 2049}, "documents"),
        ({"documents": [{"text": "d"}]}, "documents[0]"),
        ({"top_n": 0}, "top_n"),
        ({"rank_fields": ["a"]}, "rank_fields"),
    ],
)
async def test_invalid_rerank_field_is_refused_by_name(fields: Any, param: str) -> None:
    async with open_relays(add) as relays:
        await relays.serve("r", ModelType.Rerank, says([]))
        answer = await relays.send_request("/v1/rerank", {"model": "r", "query": "q", "documents": ["d"], **fields})
        assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/classify", "/v1/pooling", "/v1/rerank"])
async def test_model_of_another_type_is_not_found(path: str) -> None:
    body: dict[str, Any] = {"model": "i"} | (
        {"query": "q", "documents": ["d"]} if path.endswith("rerank") else {"input": "a"}
    )
    async with open_relays(add) as relays:
        await relays.serve("i", ModelType.Images, says({}))
        assert (await relays.send_request(path, body)).status == 404


def test_ignore_unknown_accepts_unknown_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamo.protocols.embeddings import decode_embedding, decode_rerank

    decoders: list[Callable[..., Any]] = [decode_embedding, decode_rerank]
    bodies = [b'{"model":"m","input":"a","x":1}', b'{"model":"m","query":"q","documents":["d"],"x":1}']
    for decode, body in zip(decoders, bodies, strict=True):
        with pytest.raises(InvalidArgument):
            decode(body)
        assert decode(body, ignore_unknown=True).model == "m"
