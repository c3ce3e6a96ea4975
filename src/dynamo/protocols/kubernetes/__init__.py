"""Kubernetes API types: the resources of group nvidia.com in every version, their schemas and their conversion.

Contains one Struct per object of v1alpha1 and v1beta1, field for field as upstream 1.6.1 names them; the structural schemas
and CustomResourceDefinitions derived from the Structs; and the conversion between both versions. Parts that Kubernetes
itself defines (pod templates, containers, environment variables) stay dictionaries, because every field of them that this
version of the package does not list must reach the cluster unchanged. Must not depend on a client or on the reconcilers.
"""
