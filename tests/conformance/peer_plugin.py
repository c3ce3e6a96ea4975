"""The released reference plugin: runs in the environment of `benchmarks.planner_peer` with its command line."""

import logging
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("peer_planner.py")), run_name="stubs")
logging.disable(logging.NOTSET)
runpy.run_module("dynamo.planner.examples.external_plugin.reference_runner", run_name="__main__")
