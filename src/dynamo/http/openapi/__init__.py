"""The OpenAPI document and the page that displays it."""
