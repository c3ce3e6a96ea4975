"""SLA planner: choose the number of workers from traffic and load, and explain every decision.

`config` reads and checks settings; `core` decides and is pure: observations and time are arguments, decisions with their
reasons are results. Connectors, observation and the tick loop act on them.
"""
