"""Package of experimental features; contains none."""
