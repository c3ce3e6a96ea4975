"""API formats other than OpenAI chat and completions: Responses, Anthropic Messages, batches, native generate.

Must not import: HTTP servers.
"""
