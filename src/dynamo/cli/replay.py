"""Replay: `dynamo replay` simulates a cluster under the load of a trace."""

import importlib
from collections.abc import Sequence

from dynamo.replay.main import main

HELP = """\
dynamo replay: simulate workers behind the production router, in virtual time

  dynamo replay TRACE.jsonl --num-workers 8 --router-mode kv_router
  dynamo replay TRACE.jsonl --num-workers 8 --compare kv_router --compare balanced --report-html page.html
  dynamo replay --input-tokens 4000 --output-tokens 300 --request-count 2000 --request-rate 10 --num-workers 4

  dynamo replay fit POINTS.json       fit step times to measured points, for --extra-engine-args
  dynamo replay sweep TRACE --knob …  simulate every combination of some settings; print the best flags
  dynamo replay datagen analyze       print statistics of a trace; datagen synthesize generates similar ones
  dynamo replay sin-synth             generate a trace with a sinusoidal request rate
  dynamo replay convert               convert a trace of Azure or BurstGPT to Mooncake's format

  dynamo replay --help                show every option; also after each of these subcommands
"""
TOOLS = ("fit", "sweep", "datagen", "sin-synth", "convert")


def replay(argv: Sequence[str]) -> int:
    """Run `dynamo replay`. Return 1 if requests were not completed."""
    if not argv:
        print(HELP, end="")
        return 0
    if argv[0] not in TOOLS:
        return main(argv, prog="dynamo replay")
    tool = importlib.import_module(f"dynamo.replay.{argv[0].replace('-', '_')}")
    status: int = tool.main(argv[1:], prog=f"dynamo replay {argv[0]}")
    return status
