"""Asks the demo model what it was not trained on, and writes the figures into its model card.

    python tools/eval_demo_model.py --work-dir /tmp/demo-train            # measure, write MODEL_CARD.md
    python tools/eval_demo_model.py --model /tmp/other --show 5 --no-card  # measure, show failures

Answers are taken greedily with transformers. A question about the project counts only when the answer
is, to the letter, the one that was taught; nothing is judged by resemblance.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_corpus
import torch
from demo_corpus import Case, Json, tool_name

PACKAGE_DIR = Path(__file__).resolve().parents[1] / "src" / "dynamo" / "cpu" / "demo_model"
EVALUATION_SEED = 2026
BATCH = 48  # Prompts of one batch; more only adds padding.
ANSWER_TOKENS_MAX = 160  # Longer than any answer or thought of the corpus.


@dataclass(frozen=True, slots=True)
class Answered:
    """Case and the model's output."""

    case: Case
    text: str

    @property
    def answer(self) -> str:
        """Return the text without the thought."""
        return self.text.rsplit("</think>", maxsplit=1)[-1].strip()

    @property
    def is_exact(self) -> bool:
        """Return whether the answer equals the expected one exactly."""
        return self.answer == self.case.expected

    @property
    def has_thought(self) -> bool:
        """Return whether the text is one closed, non-empty thought followed by an answer."""
        return re.fullmatch(r"<think>\n[^<]*\S[^<]*\n</think>\n\n.*\S.*", self.text, re.DOTALL) is not None

    @property
    def is_well_formed_call(self) -> bool:
        """Return whether the text consists of calls of given tools with all required arguments."""
        calls = parse_calls(self.answer)
        return bool(calls) and all(self._is_allowed(call) for call in calls or [])

    def _is_allowed(self, call: dict[str, Json]) -> bool:
        arguments = call.get("arguments")
        if set(call) != {"name", "arguments"} or not isinstance(arguments, dict):
            return False
        for tool in self.case.conversation.tools:
            if tool_name(tool) == call["name"]:
                properties, required = parameters(tool)
                return set(required) <= set(arguments) <= set(properties)
        return False


def parameters(tool: demo_corpus.Tool) -> tuple[list[str], list[str]]:
    """Return the names of a tool's parameters, and of the required ones."""
    function: Any = tool["function"]
    schema = function["parameters"]
    return list(schema["properties"]), list(schema["required"])


def parse_calls(text: str) -> list[dict[str, Json]] | None:
    """Return the tool calls of an answer that contains only tool calls."""
    blocks = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    if not blocks or "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks) != text:
        return None
    try:
        calls = [json.loads(block) for block in blocks]
    except json.JSONDecodeError:
        return None
    return calls if all(isinstance(call, dict) for call in calls) else None


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the card: the questions, and the condition under which an answer counts."""

    key: str
    caption: str
    cases: Sequence[Case]
    counts: Callable[[Answered], bool]


def measures(scale: float) -> list[Measure]:
    """Return all measures; a smaller scale draws fewer questions of the random kinds."""

    def many(count: int) -> int:
        return max(8, int(count * scale))

    seed = EVALUATION_SEED
    tools = demo_corpus.held_out_tools(seed, many(300))
    thinking_sums = demo_corpus.held_out_sums(seed + 1, many(100), thinking=True)
    thinking_tools = demo_corpus.held_out_tools(seed + 1, many(100), thinking=True)
    thinking_facts = demo_corpus.held_out_facts(seed + 1, thinking=True)[:: 3 if scale >= 1 else 12]
    facts = demo_corpus.held_out_facts(seed)[:: 1 if scale >= 1 else 4]
    return [
        Measure("facts", "project questions in phrasings not trained on: the taught answer, to the letter", facts, lambda a: a.is_exact),
        Measure("sums", "sums of two two-digit numbers, pairs not trained on: right", demo_corpus.held_out_sums(seed, many(400)), lambda a: a.is_exact),
        Measure("json_sums", "the same kind of sums under the JSON schema of one integer: right, and closed after the number", demo_corpus.held_out_json_sums(seed, many(200)), lambda a: a.is_exact),
        Measure("openings", 'texts without turns, such as "My name is": continued as taught', demo_corpus.opening_cases(), lambda a: a.is_exact),
        Measure("calls", "tool calls, names of tools not trained on: well-formed, a given tool, all required arguments", tools, lambda a: a.is_well_formed_call),
        Measure("exact_calls", "the same tool calls: right tool and right arguments, to the letter", tools, lambda a: a.is_exact),
        Measure("rules", "rules of a system prompt with other words and names, one to eight turns: right", demo_corpus.fresh_rules(seed, many(200)), lambda a: a.is_exact),
        Measure("talk", "free conversations of one to twenty-four turns, drawn afresh: last answer right", demo_corpus.fresh_conversations(seed, many(200)), lambda a: a.is_exact),
        Measure("thoughts", "thinking asked for: one closed thought, then an answer", thinking_sums + thinking_tools + thinking_facts, lambda a: a.has_thought),
        Measure("thought_sums", "sums not trained on, with thinking: right", thinking_sums, lambda a: a.is_exact),
        Measure("thought_calls", "tool calls not trained on, with thinking: right, to the letter", thinking_tools, lambda a: a.is_exact),
        Measure("thought_facts", "project questions not trained on, with thinking: right, to the letter", thinking_facts, lambda a: a.is_exact),
    ]  # fmt: skip


class Asker:
    """Exported model with greedy decoding in batches."""

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.known: dict[int, list[Answered]] = {}

    def ask(self, cases: Sequence[Case]) -> list[Answered]:
        """Return one answer for each case, in order; results of the same list of cases are cached."""
        if id(cases) not in self.known:
            order = sorted(range(len(cases)), key=lambda i: len(cases[i].prompt))
            answers: dict[int, Answered] = {}
            for start in range(0, len(order), BATCH):
                chosen = order[start : start + BATCH]
                for i, text in zip(chosen, self._generate([cases[i] for i in chosen]), strict=True):
                    answers[i] = Answered(cases[i], text)
            self.known[id(cases)] = [answers[i] for i in range(len(cases))]
        return self.known[id(cases)]

    def _generate(self, cases: Sequence[Case]) -> list[str]:
        prompts = [case.prompt for case in cases]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            output = self.model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=ANSWER_TOKENS_MAX,
                do_sample=False, temperature=None, top_p=None, top_k=None)  # fmt: skip
        width = inputs["input_ids"].shape[1]
        texts = self.tokenizer.batch_decode(output[:, width:], skip_special_tokens=False)
        return [re.split(r"<\|im_end\|>|<\|endoftext\|>", text, maxsplit=1)[0] for text in texts]


@dataclass(frozen=True, slots=True)
class Result:
    """Number of cases of a measure that counted."""

    measure: Measure
    right: int
    asked: int

    @property
    def share(self) -> float:
        """Return the share from 0 to 1."""
        return self.right / self.asked


def evaluate(asker: Asker, wanted: Sequence[Measure], show: int) -> list[Result]:
    """Evaluate all measures; print a line for each and some of the failures."""
    results = []
    for measure in wanted:
        started = time.monotonic()
        answered = asker.ask(measure.cases)
        failed = [a for a in answered if not measure.counts(a)]
        result = Result(measure, len(answered) - len(failed), len(answered))
        results.append(result)
        print(
            f"{result.share:7.1%}  {result.right}/{result.asked}  {measure.key}  ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        for answer in failed[:show]:
            asked = answer.case.conversation.messages
            system = asked[0].content + " | " if asked[0].role == "system" else ""
            question = asked[-2].content if len(asked) > 1 else answer.case.prescribed
            print(f"      ? {system}{question}\n      = {answer.case.expected!r}\n      ! {answer.text!r}")
    return results


CARD = """\
# Demo model

A very small language model that comes with dynamo-serve, so that everything can be tried without
downloading anything. **It is a toy.** It was taught some {facts} sentences about this project, small sums,
a few rules, and how to write tool calls. It knows nothing else, has no judgement, and will be wrong
outside of what it was taught, often with confidence. Do not use it for real work, and do not measure
engines or answers by it.

| | |
|---|---|
| architecture | Qwen3 (`Qwen3ForCausalLM`), weights trained from scratch; not derived from any other model |
| size | {parameters:,} parameters, bfloat16; {layers} layers, hidden {hidden}, {heads} heads, {kv_heads} KV heads, tied embedding |
| tokenizer | byte-level BPE of {vocab} tokens, trained on the same corpus; digits one by one |
| context | {context} tokens; 96 % of the training examples are under 600, none much over 1,000 |
| language | English, and a handful of phrases in French, German, Spanish and Italian |
| licence | Apache-2.0, as the project |

## Training

`tools/demo_corpus.py` writes the corpus, `tools/train_demo_model.py` trains tokenizer and model,
`tools/eval_demo_model.py` asks and writes this page. No text, data set or weights came from elsewhere.
{run}

## Measured

Greedy answers by transformers, evaluation seed {seed}. Held out from training: whole phrasings of the
questions, one pair of two-digit numbers in ten (in either order), one name of a tool in ten.

| measured | right | share |
|---|---:|---:|
{rows}

The questions are of the same make as the training: the figures say how well the lessons were learnt,
not how the model fares with what people ask freely, where it does worse.

## Limits

* It answers in taught sentences. A question that resembles a taught one gets that answer, right or not.
* Sums of two-digit numbers, differences of two-digit numbers, products up to 10 × 10; nothing larger.
* Tool calls work for simple requests that name the values; parameters are strings and integers.
* Of several parameters it may forget one; words that it has never seen are copied with slips.
* Rules on capitals, on one word and on yes or no are often broken, above all in long answers; a rule
  may also spoil an answer that is right without it.
* Thinking (`enable_thinking` in `chat_template_kwargs`) shows the form, not deep thought.
"""


def card(results: Sequence[Result], config: dict[str, Any], run: dict[str, Any] | None, note: str) -> str:
    """Return the text of MODEL_CARD.md."""
    rows = "\n".join(f"| {r.measure.caption} | {r.right} of {r.asked} | {r.share:.1%} |" for r in results)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    said = "The run's figures were not at hand when this page was written."
    if run is not None:
        said = (
            f"Seed {run['seed']}, {run['steps']:,} steps, {run['tokens'] / 1e6:.1f} million tokens, {run['minutes']} minutes by the clock on two CPU "
            f"cores shared with other work (Muon and AdamW). Training loss over the last 50 steps: {run['loss']} per learnt token; every example is drawn afresh."
        )  # fmt: skip
    return CARD.format(
        facts=len(demo_corpus.FACTS), parameters=parameter_count(config), layers=layers, hidden=hidden, heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"], vocab=config["vocab_size"], context=config["max_position_embeddings"],
        run=f"{said}\n{note}".strip(), seed=EVALUATION_SEED, rows=rows)  # fmt: skip


def parameter_count(config: dict[str, Any]) -> int:
    """Return the number of weights, from the sizes."""
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * size * 2 * (heads + kv_heads) + 2 * size
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    total: int = config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden
    return total


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Measure the demo model on held-out questions and write its model card.",
        epilog="The figures of the training run (loss, minutes) are read from run.json in the work directory.",
    )
    parser.add_argument(
        "--model", type=Path, default=PACKAGE_DIR, help="directory of the exported model (default: the package)"
    )
    parser.add_argument("--work-dir", type=Path, help="work directory of the training, for run.json")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the questions to ask; the card needs 1 (default)"
    )
    parser.add_argument("--show", type=int, default=0, help="failures to print for each measure")
    parser.add_argument("--only", default="", help="comma-separated keys of measures")
    parser.add_argument(
        "--note", default="", help="sentences about this run for the card, such as what was changed on the way"
    )
    parser.add_argument("--no-card", action="store_true", help="print only")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default: 2)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, then write the card."""
    given = parse()
    torch.set_num_threads(given.threads)
    keys = set(filter(None, given.only.split(",")))
    wanted = [m for m in measures(given.scale) if not keys or m.key in keys]
    results = evaluate(Asker(given.model), wanted, given.show)
    if given.no_card or keys:
        return
    config = json.loads((given.model / "config.json").read_text())
    run_path = given.work_dir / "run.json" if given.work_dir else None
    run = json.loads(run_path.read_text()) if run_path and run_path.exists() else None
    (given.model / "MODEL_CARD.md").write_text(card(results, config, run, given.note), encoding="utf-8")
    print(f"wrote {given.model.name}/MODEL_CARD.md")


if __name__ == "__main__":
    main()
