"""Protocol of planner plugins over gRPC, by version."""
