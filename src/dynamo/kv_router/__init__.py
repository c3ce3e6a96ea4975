"""KV router: choose a worker for each request from the workers' cached blocks and load. Pure."""
