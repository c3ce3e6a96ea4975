"""The released planner with import stubs for what is not published; run by the Python of `benchmarks.planner_peer`."""

import logging
import runpy

import peer_planner

if __name__ == "__main__":
    assert peer_planner.Stubs
    logging.disable(logging.NOTSET)
    runpy.run_module("dynamo.planner", run_name="__main__", alter_sys=True)
