"""Thorough strategy: measurements of real engines, which processes of this machine run."""
