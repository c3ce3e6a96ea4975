"""Model card: what a worker publishes about its model, and the files that the card refers to."""
