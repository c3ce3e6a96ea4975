"""Snapshots of engines: pause, wait for the snapshot or its restoration, resume with the new environment."""
