"""vLLM worker: vLLM's `AsyncLLM` in this process, with this project's endpoint, discovery and events.

Contains everything specific to vLLM: arguments, conversion of requests and outputs, events, adapters and controls.
Must not depend on the request plane or on other engines. vLLM itself is imported by `library` and `scheduler` only,
when a worker starts, so that the rest can be read and tested without it.
"""
