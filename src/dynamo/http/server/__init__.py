"""The HTTP server: protocol, limits, authentication, CORS, WebSocket."""
