"""Request plane: transports of requests and response streams, one module each, behind one interface."""
