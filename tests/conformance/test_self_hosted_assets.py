"""Model assets over HTTP: a frontend reads tokenizer and template from a worker of either implementation, not from its disk."""

import json
import os

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import Recipe, Stack, StackFailed, ours, theirs
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

FILES = {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def implementations():
    require_peer()
    return {"ours": ours(), "theirs": theirs(peer_python())}


@pytest.fixture(scope="module", params=["theirs-ours", "ours-theirs", "ours-ours"])
def stack(request, implementations):
    frontend, engine = (implementations[name] for name in request.param.split("-"))
    recipe = Recipe(name=request.param, frontend=frontend, engine=engine, variables={"DYN_SYSTEM_PORT": "0"})
    try:
        with Stack(recipe, bench_model()) as running:
            yield running
    except StackFailed as error:
        pytest.fail(str(error), pytrace=False)


def card_of(stack):
    directory = os.path.join(stack.home, "discovery", "v1", "mdc")
    (name,) = os.listdir(directory)
    with open(os.path.join(directory, name)) as file:
        return json.load(file)["card_json"]


def assets_of(card):
    for group in ("model_info", "tokenizer", "prompt_formatter", "gen_config"):
        yield from (card.get(group) or {}).values()


def test_files_of_the_model_card_are_urls_of_the_worker(stack):
    paths = [asset["path"] for asset in assets_of(card_of(stack))]
    assert len(paths) >= len(FILES)
    for path in paths:
        assert path.startswith("http://")
        assert "/v1/metadata/dynamo/backend/generate/bench/_base/" in path


def test_frontend_stores_each_file_by_hash_and_name(stack):
    cache = os.path.join(stack.home, ".cache", "dynamo", "mdc")
    wanted = {asset["checksum"].removeprefix("blake3:") for asset in assets_of(card_of(stack))}
    assert wanted <= set(os.listdir(os.path.join(cache, "blobs")))
    (by_sum,) = os.listdir(os.path.join(cache, "by-slug", "bench"))
    links = set(os.listdir(os.path.join(cache, "by-slug", "bench", by_sum)))
    assert links >= FILES
    with open(os.path.join(cache, "by-slug", "bench", by_sum, "tokenizer.json"), "rb") as file:
        fetched = file.read()
    with open(os.path.join(bench_model(), "tokenizer.json"), "rb") as file:
        assert file.read() == fetched


def test_model_is_served_from_fetched_files(stack):
    messages = [{"role": "user", "content": "How many items are there?"}]
    status, answer = stack.send_request(
        "POST", "/v1/chat/completions", {"model": "bench", "messages": messages, "max_tokens": 8}
    )
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
