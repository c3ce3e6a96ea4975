"""`python -m dynamo.frontend`."""

from dynamo.core.interpreter import run_command

if __name__ == "__main__":
    run_command("dynamo.frontend.main")
