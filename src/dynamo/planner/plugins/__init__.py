"""Planner plugins: the messages that they exchange with the pipeline, under upstream's names."""
