"""OpenAI's Responses API over the chat pipeline: requests become chats, what chats find becomes items and events.

`convert` and `writer` are pure; `archive` keeps answers for `previous_response_id`, in a `store` that is memory or a
directory. HTTP is not known here: the routes are in `http/routes/responses.py`.
"""
