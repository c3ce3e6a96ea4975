"""Image requests with real processes: they go to the worker that caches the images."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.vision_model import image, write_model

pytestmark = pytest.mark.integration

BLOCK = 16
WORDS = " what is this? tell me all about it, word by word"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "--router-mode", "kv") as cluster:
        model = write_model(tmp_path / "model")
        flags = ("--model-path", model, "--block-size", str(BLOCK), "--speedup-ratio", "0")
        for _ in range(2):
            cluster.mocker(*flags)
        yield cluster


def show(cluster: Cluster, width: int, height: int) -> dict[str, Any]:
    """Return the routing data of a prompt that contains such an image."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [image(width, height), {"type": "text", "text": WORDS}]}],
        "max_tokens": 2,
        "nvext": {"extra_fields": ["routing", "timing"]},
    }
    answer = cluster.post(body)
    assert answer.status_code == 200, answer.text
    reported = answer.json()
    cached = reported["usage"]["prompt_tokens_details"]["cached_tokens"]
    return {**reported["nvext"]["routing"], **reported["nvext"]["timing"], "cached_tokens": cached}


def test_prompts_with_the_same_image_are_routed_to_the_worker_that_caches_it(cluster: Cluster) -> None:
    first = show(cluster, 280, 280)
    assert first["kv_hit_rate"] == 0
    wait_until(lambda: show(cluster, 280, 280)["kv_hit_rate"] > 0.8, "its blocks are not known")
    again, other = show(cluster, 280, 280), show(cluster, 280, 308)
    assert again["cached_tokens"] > 100, "it holds the image's tokens too"
    assert other["kv_hit_rate"] == 0, "the text is the same, the image is not"
    assert other["cached_tokens"] < BLOCK
