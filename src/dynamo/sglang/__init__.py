"""SGLang worker: SGLang's `Engine` in this process, with this project's endpoint, discovery and events.

Contains everything specific to SGLang: arguments, conversion of requests and outputs, handshake, events and controls.
Must not depend on the request plane or on other engines. SGLang itself is imported by `library` only, when a worker
starts, so that the rest can be read and tested without it.
"""
