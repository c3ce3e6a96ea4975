"""Any OpenAI-compatible server as a worker: `python -m dynamo.openai_proxy --url http://host:port`.

The server is a separate process without any Dynamo code. Requests and responses are converted here; the fields of each
kind of server are defined in `convert` and `tokens` alone.
"""
