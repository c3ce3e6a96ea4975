"""Protocols: the types that are sent between processes, as Structs without behaviour.

Contains requests, outputs, discovery records and events, field for field as upstream 1.6.1 writes them. Must not depend
on how they are sent or on the components that act on them.
"""
