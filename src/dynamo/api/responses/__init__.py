"""OpenAI's Responses API on the chat pipeline: requests become chat requests, output becomes items and events.

`convert` and `writer` are pure; `archive` keeps responses for `previous_response_id`, in a `store` in memory or in a
directory. Must not import: HTTP servers; the routes are in `http/routes/responses.py`.
"""
