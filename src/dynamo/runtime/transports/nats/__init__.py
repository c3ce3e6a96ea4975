"""NATS connection of the request plane and the event plane. The client library is imported only when it is used."""
