"""Offline replays for `replay_peer`, with whichever `dynamo` the interpreter imports: ours, or the released one.

    PYTHON replay_peer_run.py < cases.json

Reads a list of `{"name", "trace", "arguments"}`; writes a line of JSON with the summary of each case.
"""

import json
import sys

from dynamo.replay import run_trace_replay


def main() -> None:
    for case in json.load(sys.stdin):
        report = run_trace_replay(case["trace"], **case["arguments"])
        print(json.dumps({"name": case["name"], "summary": report.summary}), flush=True)


if __name__ == "__main__":
    main()
