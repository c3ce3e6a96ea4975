"""Mocker: an inference engine without a model, with simulated scheduling, caching and step times and random tokens.

Contains the simulated scheduler and cache (`simulation`, pure) and the asyncio shell that runs it in real time behind a
worker. Does not depend on request transport or on other engines.
"""
