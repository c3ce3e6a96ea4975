"""TensorRT-LLM as a worker: its `LLM` in this process, behind our endpoint, discovery and events.

Lives here: what is TensorRT-LLM's own: its arguments, its words for a request and an answer, its handshake and events.
Must not know: how a request travels, or any other engine. TensorRT-LLM itself is imported by `library` alone, when a
worker starts, so that everything else can be read and tested without it.
"""
