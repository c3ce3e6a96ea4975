"""Kubernetes client: requests with the configuration of the environment, and views of objects that watches keep current."""
