"""Chat templates: Hugging Face's Jinja dialect in a sandbox."""
