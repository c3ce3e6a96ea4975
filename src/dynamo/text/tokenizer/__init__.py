"""Tokenizers: text to ids, by the first available implementation that passes the equality self-test."""
