"""TensorRT-LLM worker: its `LLM` in this process, with this project's endpoint, discovery and events.

Contains everything specific to TensorRT-LLM: arguments, conversion of requests and outputs, handshake and events.
Must not depend on the request plane or on other engines. TensorRT-LLM itself is imported by `library` only, when a
worker starts, so that the rest can be read and tested without it.
"""
