"""Anthropic's Messages API over the chat pipeline: requests become chats, what chats find becomes content blocks. Pure.

HTTP is not known here: the routes are in `http/routes/anthropic.py`.
"""
