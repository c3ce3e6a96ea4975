"""Reports of a planner: what each tick observed, predicted and decided, as charts and as a log."""
