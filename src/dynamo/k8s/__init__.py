"""Kubernetes client, views of objects that watches keep current, and the parts of controllers: queue, workers, election, events."""
