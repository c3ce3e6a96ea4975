"""Block hashing: hashes that identify equal prefixes in a router and its workers.

Pure. The package has no notion of workers or models.
"""
