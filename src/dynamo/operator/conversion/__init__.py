"""Conversion between v1alpha1 and v1beta1, without loss in either direction. Pure.

Fields that the other version does not have are kept in annotations of the converted object. A change made in the other
version is merged into the kept original, so that only the changed fields differ when it is converted back.
"""
