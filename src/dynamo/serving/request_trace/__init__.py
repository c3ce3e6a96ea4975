"""Request trace: one record per finished request, optionally with its payload, written to sinks."""
