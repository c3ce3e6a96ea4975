"""SGLang as a worker: its `Engine` in this process, behind our endpoint, discovery and events.

Lives here: what is SGLang's own: its arguments, its words for a request and an answer, its handshake, events and controls.
Must not know: how a request travels, or any other engine. SGLang itself is imported by `library` alone, when a worker
starts, so that everything else can be read and tested without it.
"""
