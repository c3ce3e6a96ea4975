"""Any OpenAI server as a worker: `python -m dynamo.openai_proxy --url http://host:port`.

The server runs elsewhere and knows nothing of us: what it is asked and what it answers is translated here, and nothing
of it is imported. What a request becomes in each server's words is decided in `convert` and `tokens` alone.
"""
