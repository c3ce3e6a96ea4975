"""`python -m dynamo.operator`."""

from dynamo.core.interpreter import run_command

if __name__ == "__main__":
    run_command("dynamo.operator.process")
