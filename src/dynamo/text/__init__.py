"""Text in, token ids out, and back.

Lives here: chat templates, tokenizers, the preprocessor, guided decoding, multimodal inputs, answer parsing, the detokenizer.
Must not import: serving, HTTP, or anything that sends requests.
"""
