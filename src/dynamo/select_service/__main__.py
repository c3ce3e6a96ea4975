"""`python -m dynamo.select_service`."""

from dynamo.core.interpreter import run_command

if __name__ == "__main__":
    run_command("dynamo.select_service.main")
