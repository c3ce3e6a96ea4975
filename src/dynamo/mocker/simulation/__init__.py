"""Simulation: scheduler, cache and step times of vLLM-like engines as pure code.

It reads no clock: the caller passes the current time and waits, or does not, for the duration of each step.
Does not depend on asyncio, workers or request transport.
"""
