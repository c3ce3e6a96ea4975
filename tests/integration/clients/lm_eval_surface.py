"""lm-eval: its `local-completions` model over `/v1/completions`, on tasks that are written here; nothing is downloaded.

Log-likelihood tasks need `echo` with `logprobs`: the score of a text that the client gives.
"""

import atexit
import json
import math
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="lm-eval-")  # For data sets and their cache; removed at exit.

import lm_eval
import requests
from lm_eval.tasks import TaskManager
from surface import DEMO, check, main, places

URL, _, _ = places()
FOLDER = Path(os.environ["HF_HOME"])
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
TOKENIZER = Path(__file__).parents[3] / "src" / "dynamo" / "cpu" / "demo_model"
TASKS = TaskManager(include_defaults=False)  # Importing the thousands of tasks of lm-eval takes a minute.
SUMS = [(12, 30), (25, 14), (71, 18), (33, 33), (50, 27), (64, 19)]
SENTENCES = [
    "A worker is a process that runs an engine and answers requests.",
    "Top-k keeps only the k likeliest tokens.",
]


def task(name: str, rows: list[dict[str, Any]], **config: Any) -> dict[str, Any]:
    """Return a task on these rows."""
    path = FOLDER / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test",
        **config,
    }  # fmt: skip


def evaluate(config: dict[str, Any], **model: Any) -> dict[str, Any]:
    """Return the metrics of one task."""
    arguments = {
        "model": DEMO, "base_url": f"{URL}/v1/completions", "tokenizer": str(TOKENIZER), "tokenizer_backend": "huggingface",
        "max_length": 512, "max_retries": 1, **model,
    }  # fmt: skip
    found: Any = lm_eval.simple_evaluate(
        "local-completions",
        model_args=arguments,
        tasks=[config],
        task_manager=TASKS,
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    return dict(found["results"][config["task"]])


def perplexity(texts: list[str], name: str, **model: Any) -> float:
    """Return the perplexity of texts, in words."""
    config = task(
        name, [{"text": text} for text in texts],
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}", metric_list=[{"metric": "word_perplexity"}],
    )  # fmt: skip
    return float(evaluate(config, **model)["word_perplexity,none"])


@check
def the_likeliest_answer_is_chosen() -> None:
    rows = [{"a": a, "b": b, "sums": [str(a + b + 1), str(a + b), str(a + b - 10)], "right": 1} for a, b in SUMS]
    config = task(
        "sums", rows,
        output_type="multiple_choice", doc_to_text="{{a}} + {{b}} =", doc_to_choice="{{sums}}", doc_to_target="right",
        metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    for options in ({}, {"batch_size": 4}, {"num_concurrent": 4}):
        assert evaluate(config, **options)["acc,none"] == 1.0, options


@check
def a_word_that_follows_for_certain_is_greedy() -> None:
    rows = [
        {"text": "A worker is a process that runs an", "word": "engine"},
        {"text": "Top-k keeps only the k", "word": "sky"},
    ]
    config = task(
        "lambada", rows,
        output_type="loglikelihood", doc_to_text="{{text}}", doc_to_target=" {{word}}",
        metric_list=[{"metric": "acc"}, {"metric": "perplexity"}],
    )  # fmt: skip
    found = evaluate(config)
    assert found["acc,none"] == 0.5
    assert math.isfinite(found["perplexity,none"])


@check
def a_text_that_was_learnt_surprises_less_than_one_that_was_not() -> None:
    shuffled = [" ".join(sorted(sentence.split())) for sentence in SENTENCES]
    learnt = perplexity(SENTENCES, "learnt")
    assert 1.0 <= learnt < perplexity(shuffled, "shuffled") / 10
    assert math.isclose(perplexity(SENTENCES, "again", batch_size=2), learnt, rel_tol=1e-3)


@check
def texts_are_generated() -> None:
    rows = [{"a": a, "b": b, "sum": str(a + b)} for a, b in SUMS]
    config = task(
        "generated", rows,
        output_type="generate_until", doc_to_text="{{a}} + {{b}} =", doc_to_target="{{sum}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8}, metric_list=[{"metric": "exact_match"}],
        filter_list=[{"name": "none", "filter": [{"function": "regex", "regex_pattern": "(\\d+)"}, {"function": "take_first"}]}],
    )  # fmt: skip
    assert evaluate(config)["exact_match,none"] == 1.0


@check
def an_echo_of_no_tokens_has_the_same_logprobs() -> None:
    body = {"model": DEMO, "prompt": SENTENCES[0], "echo": True, "logprobs": 1, "temperature": 0}
    alone, longer = (
        requests.post(f"{URL}/v1/completions", json=body | {"max_tokens": count}, timeout=60).json()["choices"][0]
        for count in (0, 1)
    )
    prompt = alone["logprobs"]["token_logprobs"]
    assert (alone["text"], prompt[0], len(longer["logprobs"]["tokens"])) == (SENTENCES[0], None, len(prompt) + 1)
    pairs = zip(prompt[1:], longer["logprobs"]["token_logprobs"][1:-1], strict=True)
    assert all(math.isclose(one, other, abs_tol=1e-3) for one, other in pairs)


if __name__ == "__main__":
    print(f"lm-eval {version('lm-eval')} on Python {sys.version.split()[0]}", flush=True)
    main()
