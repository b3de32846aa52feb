"""The Helm chart: the rendered overlays that it contains."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

CHART: Final = Path(__file__).resolve().parent / "kvferry"
OVERLAYS: Final = ("two-tier", "vllm", "dev-tcp")
"""The overlays that the chart can install, as `overlay` in its values."""

_KUBERNETES: Final = Path(__file__).resolve().parents[1] / "kubernetes"


def file_of(overlay: str) -> Path:
    """Return the file of the chart that has the objects of an overlay."""
    return CHART / "files" / f"{overlay}.yaml"


def rendered(overlay: str, program: list[str]) -> str:
    """Return the objects of an overlay, as kustomize renders them.

    Args:
        program: Command that renders a folder, such as ``["kubectl", "kustomize"]``.

    Raises:
        subprocess.CalledProcessError: kustomize fails.
    """
    command = [*program, str(_KUBERNETES / "overlays" / overlay)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
