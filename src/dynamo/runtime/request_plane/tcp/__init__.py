"""Request plane over TCP: batched frames between processes of this implementation, Dynamo framing with released peers.

Each framing has two modules, one per role; `plane` listens, connects and selects the framing.
"""
