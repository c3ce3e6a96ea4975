"""Hashes and histories of the released implementation.

Run by a released peer's Python: cases on stdin, results on stdout.
"""

import json
import sys

from dynamo.llm import RadixTree, compute_block_hash_for_seq


def history(steps):
    """Return the scores of each prompt that the history queries."""
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
