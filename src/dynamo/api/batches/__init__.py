"""Batches: OpenAI's files and batches in a local directory, and the background worker that runs them.

Must not import: HTTP servers and serving. The function that serves one request is passed to the runner.
"""
