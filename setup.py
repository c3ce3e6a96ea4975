"""Setup: the package's one compiled module, a twin of `dynamo.kv_router.names.PythonNames`; the rest is in pyproject.toml.

It is built where a C compiler works; elsewhere, and with DYNAMO_PURE=1, the package and its wheel are pure Python.
"""

import os
import sysconfig
import tempfile

from setuptools import Extension, setup

SOURCE = "src/dynamo/kv_router/_names.c"


def can_compile() -> bool:
    """Return whether the module compiles here: a wheel's tag must be known before it is built."""
    if os.environ.get("DYNAMO_PURE"):
        return False
    # From setuptools, whose import provides these names where Python no longer has them.
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    try:
        customize_compiler(compiler)
        with tempfile.TemporaryDirectory() as folder:
            compiler.compile([SOURCE], output_dir=folder, include_dirs=[sysconfig.get_path("include")])
    except Exception:  # noqa: BLE001 - every compiler of setuptools has errors of its own
        return False
    return True


setup(ext_modules=[Extension("dynamo.kv_router._names", [SOURCE], optional=True)] if can_compile() else [])
