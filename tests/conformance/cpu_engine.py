"""The CPU engine as a stack's engine, which is given a model directory that has no weights."""

import runpy
import sys

if __name__ == "__main__":
    at = sys.argv.index("--model-path")
    del sys.argv[at : at + 2]
    runpy.run_module("dynamo.cpu", run_name="__main__", alter_sys=True)
