"""Tokenizers: text to ids, by the first implementation that is available and proved equal."""
