"""For every test: deterministic hypothesis runs in CI, no thread storms, honest GPU skips, who runs when and who twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: several processes of a test cluster share few cores, and each would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared, loaded machine makes single examples slow at random; pytest-timeout bounds the whole test instead.
settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("kvferry"), derandomize=True, print_blob=True)
# By hand, for hours: pytest --hypothesis-profile=soak --timeout=0 tests/protocol
settings.register_profile("soak", settings.get_profile("kvferry"), max_examples=20_000)
settings.load_profile("ci" if os.environ.get("CI") else "kvferry")


CLUSTERS = ("tests/cluster/", "tests/cluster/faults/", "tests/router/test_nodes.py")
# The longest first, so that no worker is left with them when the others are done. Of the clusters those that are held to a time
# come last: the other worker is then past its own clusters, and starts no dozen of processes beside them.
FIRST = (
    "tests/cluster/nodes/test_tokens.py",
    "tests/cluster/nodes/test_bad_start.py",
    "tests/cluster/nodes/test_serving.py",
    "tests/cluster/nodes/test_stop.py",
    "tests/cluster/nodes/test_two_prefill_nodes.py",
    "tests/cluster/faults/",
    "tests/cli/test_demo.py",
    "tests/cli/test_local_cluster.py",
    "tests/protocol/test_world.py",
    "tests/bench/",
)
# Real processes, threads, sockets, signals and clocks, on a machine that may stand still for seconds: in CI a test that fails has
# a second run, and the first failure is printed even when that one passes. Tests of logic have one run everywhere, and these too
# at home.
ROOMS_OF_THE_WORLD = (
    "bench",
    "chaos",
    "cli",
    "cluster",
    "compatibility",
    "control",
    "engine",
    "hosted",
    "meta",
    "monitoring",
    "rdma",
    "registry",
    "router",
    "runtime",
    "seeing",
    "storage",
    "tracing",
    "transport",
)
# Of rooms that are logic for the most part.
FILES_OF_THE_WORLD = (
    "tests/decode/test_peers",
    "tests/deploy/test_two_pods.py",
    "tests/offload/test_nothing_is_left.py",
    "tests/offload/test_prefill_skips.py",
    "tests/offload/test_prefixes.py",
    "tests/offload/test_refused_offload.py",
    "tests/offload/test_store_faults.py",
    "tests/offload/test_tokens.py",
    "tests/prefill/test_attach.py",
    "tests/prefill/test_join_stream.py",
    "tests/prefill/test_prefix_loader.py",
    "tests/prefill/test_prefix_loads.py",
    "tests/vllm/test_servers.py",
)
OF_THE_WORLD = (*(f"tests/{room}/" for room in ROOMS_OF_THE_WORLD), *FILES_OF_THE_WORLD)
# No process, socket or clock decides what comes of these; but for the two that time what they call.
ROOMS_OF_LOGIC = ("tests/unit/", "tests/protocol/", "tests/kernels/", "tests/engine/", "tests/fuzz/", "tests/mutation/")
TIMED = ("tests/unit/test_messages.py", "tests/unit/test_model_shape.py")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # by number of tests, which would put the longest files last


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> object | None:
    """For ``--dist loadfile``: a file to a worker, and all of `CLUSTERS` to one, which so has one model and one `steady`.

    A worker of low priority (``--tx popen//nice=10``) gets files of `ROOMS_OF_LOGIC` only, and the others get those last: it
    takes what the processors have left while tests wait for processes and clocks, and takes nothing from them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return CLUSTERS[0] if nodeid.startswith(CLUSTERS) else nodeid.split("::", 1)[0]

        def _assign_work_unit(self, node: Any) -> None:
            logic = [scope for scope in self.workqueue if is_logic(scope)]
            if node.gateway.spec.nice:
                if not logic:
                    node.shutdown()  # once it has done what it has
                    return
                self.workqueue.move_to_end(logic[0], last=False)
            else:
                for scope in logic:
                    self.workqueue.move_to_end(scope)
            super()._assign_work_unit(node)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def is_logic(path: str) -> bool:
    """Whether that file's tests give the same result on a machine that is as slow as you like."""
    return path.startswith(ROOMS_OF_LOGIC) and path not in TIMED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `OF_THE_WORLD`, sort by `FIRST`, skip `gpu` where the driver has no device node (no torch needed to tell)."""
    if os.environ.get("CI"):
        for item in items:
            if item.nodeid.startswith(OF_THE_WORLD):
                item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: next((rank for rank, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST)))
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: there is no /dev/nvidia0 here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_gpu)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why the first run failed, where there was a second one: a test that fails now and then is a flaw of it or of kvferry."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"failed once: {report.nodeid}")
        terminalreporter.line(report.longreprtext)
