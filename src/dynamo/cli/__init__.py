"""The `dynamo` command: starts a graph of processes and provides clients for a terminal.

Contents: the command line and terminal output. Must not depend on how a request is served. Every process it starts
can be started by hand (`python -m dynamo.frontend`, `python -m dynamo.cpu`); it queries servers only over HTTP.
Start-up time is visible to the user, so heavy modules are imported only after the children have been started.
"""
