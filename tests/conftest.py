"""For every test: reproducible hypothesis runs in CI, one thread per process, skips without a GPU, and which worker runs what."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: the processes of a cluster share few cores, and each would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine makes single examples slow; pytest-timeout bounds the whole test instead.
settings.register_profile("kvferry", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("kvferry"), derandomize=True, print_blob=True)
# By hand, for hours: pytest --hypothesis-profile=soak --timeout=0 tests/protocol
settings.register_profile("soak", settings.get_profile("kvferry"), max_examples=20_000)
settings.load_profile("ci" if os.environ.get("CI") else "kvferry")

SERVING = "tests/serving/"
"""One worker runs all of this folder, whose tests share clusters."""
LONGEST = (SERVING, "tests/cli/test_demo", "tests/protocol/test_world", "tests/embedded_engine/test_under_interpreter")
"""Begin with these, so that no worker is left with one of them when the others have finished."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would begin with the files of most tests
    missing = [path for path in (argument.split("::")[0] for argument in config.args) if not Path(path).exists()]
    if missing:  # workers of xdist report nothing and collect nothing
        raise pytest.UsageError(f"file or directory not found: {', '.join(missing)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line(
            "no test matches: check the names of tests and the expression of -k; -n0 shows pytest's message"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> object | None:
    """For ``--dist loadfile``: a worker runs a whole file, or all of `SERVING`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SERVING if nodeid.startswith(SERVING) else nodeid.split("::", 1)[0]

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with `LONGEST`, and skip `gpu` where the driver has no device node (no torch needed to tell)."""
    items.sort(key=lambda item: next((rank for rank, path in enumerate(LONGEST) if item.nodeid.startswith(path)), len(LONGEST)))
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: there is no /dev/nvidia0 here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_gpu)
