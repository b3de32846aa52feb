"""Runs of `kvferry demo` in a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvferry.local_cluster.spec import child_environment


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, with what it wrote."""
    command = [sys.executable, "-m", "kvferry", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=child_environment())
