"""Reconcile of DynamoGraphDeploymentRequests: hardware, profiling job, its result, and the phases of a request. Pure."""
