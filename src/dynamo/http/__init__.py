"""The HTTP face: routes, errors, and the one small module that writes token streams to the transport itself.

Must not know: how a request reaches a worker (that is `llm.pipeline`), or how text is made from tokens.
"""
