"""Generated graph: components of the picked configuration, features and overrides. Pure."""
