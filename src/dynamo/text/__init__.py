"""Text processing: requests to token ids, and token ids back to text.

Contains chat templates, tokenizers, the preprocessor, guided decoding, multimodal inputs, answer parsing, the
detokenizer. Must not import serving, HTTP, or anything that sends requests.
"""
