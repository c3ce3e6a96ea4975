"""Batches: files of requests that are answered in the background, and the files that they are kept in.

Lives here: OpenAI's files and batches over a local directory, and the worker that runs them.
Must not know: sockets, and how a request is answered. It is told whom to ask.
"""
