"""The OpenAI-compatible HTTP frontend as a command: `python -m dynamo.frontend`.

Contents: its options and its process. Requests are served by `dynamo.llm`.
"""
