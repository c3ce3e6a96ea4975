"""Setup: the package's one compiled module, a twin of `dynamo.kv_router.names.PythonNames`; the rest is in pyproject.toml.

Without a compiler the package installs all the same.
"""

from setuptools import Extension, setup

setup(ext_modules=[Extension("dynamo.kv_router._names", ["src/dynamo/kv_router/_names.c"], optional=True)])
