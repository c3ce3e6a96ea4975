"""A prompt as embeddings: vLLM continues it as it continues the tokens that have these embeddings."""

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engines.conftest import EngineCluster

pytestmark = pytest.mark.engines

TOKENS = [5, 9, 17, 33, 40, 8, 12, 61]


@pytest.fixture(scope="module")
def cluster(serve: Callable[[str], EngineCluster]) -> EngineCluster:
    servers = serve("embeds")
    servers.frontend()
    servers.worker("worker", "--enable-prompt-embeds")
    servers.until_ready()
    return servers


def saved(tensor: Any) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def embeddings_of(model: str, tokens: list[int]) -> Any:
    weights = load_file(f"{model}/model.safetensors")
    (table,) = [value for name, value in weights.items() if name.endswith("embed_tokens.weight")]
    return table[tokens].to(torch.bfloat16)


def test_vllm_continues_prompt_embeds_as_it_continues_their_tokens(cluster: EngineCluster) -> None:
    common = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    plain = cluster.post("/v1/completions", **common, prompt=TOKENS)
    embeds = saved(embeddings_of(cluster.model, TOKENS))
    given = cluster.post("/v1/completions", **common, prompt="", prompt_embeds=embeds)
    assert given["choices"][0]["text"] == plain["choices"][0]["text"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [given["usage"][name] for name in counts] == [plain["usage"][name] for name in counts]


@pytest.mark.parametrize("tensor", [torch.zeros(4, 3), {"not": "a tensor"}, torch.zeros(8, dtype=torch.int64)])
def test_vllm_refuses_prompt_embeds_that_do_not_fit_the_model(cluster: EngineCluster, tensor: Any) -> None:
    body = {"model": "tiny", "max_tokens": 2, "prompt_embeds": saved(tensor)}
    answer = cluster.http.post(cluster.url("/v1/completions"), json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
