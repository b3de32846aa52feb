"""Build the compiled copies of host memory. Everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "transfer.copy._host_copy",
            sources=["transfer/copy/_host_copy.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra"],
            py_limited_api=True,
            optional=True,  # without a compiler or Python's headers, copies are NumPy's (transfer/copy/host_copy.py)
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
