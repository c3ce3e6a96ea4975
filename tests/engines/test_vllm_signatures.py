"""The scripted vLLM of the unit tests has the real one's signatures."""

import json
import os
import subprocess

import pytest
from tests.engines.tiny_model import ROOT

pytestmark = pytest.mark.engines

PROGRAM = """
import dataclasses, inspect, json, sys
sys.path.insert(0, sys.argv[1])
from tests.unit.vllm import scripted
from dynamo.vllm.library import load_library
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

library = load_library()

def shape(function):
    return [[name, str(one.kind), one.default is inspect.Parameter.empty]
            for name, one in inspect.signature(function).parameters.items()]

def names(function):
    return set(inspect.signature(function).parameters)

wrong = {}
for name in scripted.METHODS:
    ours, theirs = shape(getattr(scripted.AsyncLLM, name)), shape(getattr(library.AsyncLLM, name, None) or (lambda: 0))
    if ours != theirs:
        wrong[name] = [ours, theirs]
for name, known, real in (
    ("SamplingParams", scripted.SAMPLING, library.SamplingParams),
    ("StructuredOutputsParams", scripted.GUIDED, library.StructuredOutputsParams),
    ("PoolingParams", scripted.POOLING, library.PoolingParams),
    ("LoRARequest", names(scripted.LoRARequest), library.LoRARequest),
    ("Logprob", names(scripted.Logprob), Logprob),
    ("CompletionOutput", names(scripted.CompletionOutput), CompletionOutput),
    ("RequestOutput", names(scripted.RequestOutput), RequestOutput),
    ("AsyncEngineArgs", names(scripted.AsyncEngineArgs), library.AsyncEngineArgs),
):
    if missing := set(known) - names(real):
        wrong[name] = sorted(missing)
print(json.dumps(wrong))
"""


def test_scripted_engine_has_the_signatures_of_vllm(engines_python: str) -> None:
    done = subprocess.run(
        [engines_python, "-c", PROGRAM, ROOT], capture_output=True, text=True, timeout=300, check=False, cwd=os.sep
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}
