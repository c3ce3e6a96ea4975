"""Anthropic's Messages API on the chat pipeline: requests become chat requests, output becomes content blocks. Pure.

Must not import: HTTP servers. The routes are in `http/routes/anthropic.py`.
"""
