"""State of the standalone routing services: indexer and selection."""
