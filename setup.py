"""Build the compiled code. Everything else about the package is in pyproject.toml."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCES = ("transfer/copy/_host_copy.c", "transfer/receive/_signals.c")

setup(
    ext_modules=[
        Extension(
            source.removesuffix(".c").replace("/", "."),
            sources=[source],
            # Code that was built from another version of the file is not used (`transfer.copy.compiled_copy.is_current`).
            define_macros=[("SOURCE_HASH", f'"{hashlib.sha256(Path(source).read_bytes()).hexdigest()}"')],
            extra_compile_args=["-O3", "-std=gnu11", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,  # without a compiler or Python's headers, NumPy copies, and there are no signals
        )
        for source in SOURCES
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
