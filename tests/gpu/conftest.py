"""What a run on a GPU found out beside passed and failed: printed behind all tests, for it is easily lost among them."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each model and type: the decode steps that were captured in CUDA graphs."""
    found = {
        str(value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in report.user_properties
        if name == "captured"
    }
    for line in sorted(found):
        terminalreporter.write_line(f"captured {line}")
