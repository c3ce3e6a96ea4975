"""Event plane: events from many publishers to subscribers; one module per transport.

This package contains envelopes, sequence numbers and gap detection. It does not depend on the meaning of events.
"""
