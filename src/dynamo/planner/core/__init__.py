"""Planner core: from the observations of a tick to a decision with its reasons.

Pure: no sockets, no clock, no log lines, no tasks. The caller passes time, observations and the plugins' responses, acts on
the returned decision, and reports what is in it.
"""
