"""Hashes and histories on the peer's side. Runs under a released peer's Python: questions on stdin, answers on stdout."""

import json
import sys

from dynamo.llm import RadixTree, compute_block_hash_for_seq


def history(steps):
    """The scores of each prompt that is queried on the way."""
    tree, found = RadixTree(), []
    for kind, worker, value in steps:
        if kind == "event":
            tree.apply_event(worker, json.dumps(value).encode())
        elif kind == "leave":
            tree.remove_worker(worker)
        else:
            scores = tree.find_matches(value).scores
            found.append(sorted([*rank, blocks] for rank, blocks in scores.items()))
    return found


questions = json.load(sys.stdin)
json.dump(
    {
        "hashes": [compute_block_hash_for_seq(**question) for question in questions["hashes"]],
        "histories": [history(steps) for steps in questions["histories"]],
    },
    sys.stdout,
)
