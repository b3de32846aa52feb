"""Build the compiled copies of host memory. Everything else about the package is in pyproject.toml."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "transfer/copy/_host_copy.c"

setup(
    ext_modules=[
        Extension(
            "transfer.copy._host_copy",
            sources=[SOURCE],
            # `transfer.copy.compiled_copy` does not use code that was built from another version of the file.
            define_macros=[("SOURCE_HASH", f'"{hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest()}"')],
            extra_compile_args=["-O3", "-std=gnu11", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,  # without a compiler or Python's headers, copies are NumPy's (transfer/copy/host_copy.py)
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
