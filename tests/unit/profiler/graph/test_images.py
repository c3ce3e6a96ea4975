import pytest

from dynamo.profiler.graph.images import backend_image, planner_image


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ("nvcr.io/nvidia/ai-dynamo/dynamo-planner:1.6.1", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1"),
        ("localhost:5000/a/b:tag", "localhost:5000/a/vllm-runtime:tag"),
        ("a/b@sha256:0f", "a/vllm-runtime@sha256:0f"),
        ("a/b:tag@sha256:0f", "a/vllm-runtime:tag@sha256:0f"),
        ("plain", "vllm-runtime"),
    ],
)
def test_last_path_element_is_replaced(image: str, found: str) -> None:
    assert backend_image(image, "vllm") == found


def test_each_backend_and_the_planner_have_an_image() -> None:
    assert backend_image("r/x:1", "sglang") == "r/sglang-runtime:1"
    assert backend_image("r/x:1", "trtllm") == "r/tensorrtllm-runtime:1"
    assert planner_image("r/x:1") == "r/dynamo-planner:1"
