"""Plugin transport: calls of plugins in this process and over gRPC, their registration, and the audit log.

The decisions of a tick are made by `dynamo.planner.core`; this package makes the calls of a tick, each with a deadline.
"""
