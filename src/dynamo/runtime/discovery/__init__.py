"""Service discovery: records that live as long as the process that wrote them; one module per registry.

This package stores and watches buckets of key → bytes. It does not depend on the content of the records.
"""
