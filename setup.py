"""Setup: the package's five compiled modules, equivalents of `dynamo.kv_router.names.PythonNames`,
`dynamo.mocker.simulation.marks.PythonMarks` and `dynamo.text.tokenizer.word_tokenizer`, and of functions of
`dynamo.tokens.hashing` and `dynamo.serving.token_path`; the rest is in pyproject.toml.

They are built where a C compiler works; elsewhere, and with DYNAMO_PURE=1, the package and its wheel are pure Python.
"""

import os
import sysconfig
import tempfile

from setuptools import Extension, setup

SOURCES = {
    "dynamo.kv_router._names": "src/dynamo/kv_router/_names.c",
    "dynamo.mocker.simulation._marks": "src/dynamo/mocker/simulation/_marks.c",
    "dynamo.serving._token_path": "src/dynamo/serving/_token_path.c",
    "dynamo.text.tokenizer._compiled_words": "src/dynamo/text/tokenizer/_compiled_words.c",
    "dynamo.tokens._hashing": "src/dynamo/tokens/_hashing.c",
}
HEADERS = {
    "dynamo.text.tokenizer._compiled_words": [
        "src/dynamo/text/tokenizer/_merges.h",
        "src/dynamo/text/tokenizer/_split_rules.h",
    ]
}


def can_compile() -> bool:
    """Return whether the modules compile here: a wheel's tag must be known before it is built."""
    if os.environ.get("DYNAMO_PURE"):
        return False
    # From setuptools, whose import provides these names where Python no longer has them.
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    try:
        customize_compiler(compiler)
        with tempfile.TemporaryDirectory() as folder:
            compiler.compile(list(SOURCES.values()), output_dir=folder, include_dirs=[sysconfig.get_path("include")])
    except Exception:  # noqa: BLE001 - every compiler of setuptools has errors of its own
        return False
    return True


extensions = [
    Extension(name, [source], depends=HEADERS.get(name, []), optional=True) for name, source in SOURCES.items()
]
setup(ext_modules=extensions if can_compile() else [])
