"""vLLM as a worker: its `AsyncLLM` in this process, behind our endpoint, discovery and events.

Lives here: what is vLLM's own: its arguments, its words for a request and an answer, its events, adapters and controls.
Must not know: how a request travels, or any other engine. vLLM itself is imported by `library` and `scheduler` alone,
when a worker starts, so that everything else can be read and tested without it.
"""
