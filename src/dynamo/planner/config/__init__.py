"""Planner settings: declaration, sources (JSON, YAML, inline text, environment, legacy flags) and validation. Pure, except `source`."""
