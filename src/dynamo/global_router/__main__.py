"""`python -m dynamo.global_router`."""

from dynamo.core.interpreter import run_command

if __name__ == "__main__":
    run_command("dynamo.global_router.main")
