"""`python -m dynamo.slot_tracker`."""

from dynamo.core.interpreter import run_command

if __name__ == "__main__":
    run_command("dynamo.slot_tracker.main")
