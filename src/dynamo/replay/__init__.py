"""Replay: the production router with simulated engines in virtual time: a cluster of any size on one core.

Contains reading and generating loads, the event loop of virtual time, and the reports. Does not depend on sockets,
processes or wall time (except to show progress). All randomness comes from one seed: the same command gives the same
report.
"""
