"""Kubernetes API server for tests: storage, REST, watch, CRDs, webhooks and the controllers that an operator relies on."""
