"""The OpenAPI document and the page that draws it."""
