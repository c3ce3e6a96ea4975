"""Troubleshoot: known causes of failures, found in logs, Kubernetes objects, metrics and discovery records."""
