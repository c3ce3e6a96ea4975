"""Global planner: executes the scale requests of several deployments under one band of GPUs (`dynamo.global_planner`).

`arbitration` decides and is pure: pools, targets and time are arguments. `executor` reads and scales the deployments, `handler`
serves the requests, `main` holds the options of the process. It computes no load: each deployment's own planner does.
"""
