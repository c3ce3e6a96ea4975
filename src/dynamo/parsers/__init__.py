"""Parsers: split a model's text into content, reasoning and tool calls, independent of chunk boundaries. Pure."""
