"""A prompt as embeddings: vLLM continues it as it continues the tokens that have these embeddings."""

import subprocess
from collections.abc import Callable

import pytest
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


SAVE = """
import base64, io, sys, torch
from safetensors.torch import load_file
def rows(tokens):
    return load_file(f"{sys.argv[1]}/model.safetensors")["model.embed_tokens.weight"][tokens].to(torch.bfloat16)
file = io.BytesIO()
torch.save(eval(sys.argv[2]), file)
print(base64.b64encode(file.getvalue()).decode())
"""
"""Prints the tensor of an expression as clients send it; PyTorch is in the engines' environment only."""


def saved(servers: EngineCluster, expression: str) -> str:
    command = [servers.python, "-c", SAVE, servers.model, expression]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()


def test_vllm_continues_prompt_embeds_as_it_continues_their_tokens(cluster: EngineCluster) -> None:
    common = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    plain = cluster.post("/v1/completions", **common, prompt=TOKENS)
    embeds = saved(cluster, f"rows({TOKENS})")
    given = cluster.post("/v1/completions", **common, prompt="", prompt_embeds=embeds)
    assert given["choices"][0]["text"] == plain["choices"][0]["text"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [given["usage"][name] for name in counts] == [plain["usage"][name] for name in counts]


@pytest.mark.parametrize("tensor", ["torch.zeros(4, 3)", "{'not': 'a tensor'}", "torch.zeros(8, dtype=torch.int64)"])
def test_vllm_refuses_prompt_embeds_that_do_not_fit_the_model(cluster: EngineCluster, tensor: str) -> None:
    body = {"model": "tiny", "max_tokens": 2, "prompt_embeds": saved(cluster, tensor)}
    answer = cluster.http.post(cluster.url("/v1/completions"), json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
