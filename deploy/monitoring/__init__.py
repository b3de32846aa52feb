"""What watches a cluster: Grafana dashboards and alerts, as code and as the files that it gives.

``python -m deploy.monitoring`` writes the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.charts import Dashboard
from deploy.monitoring.link import LINK
from deploy.monitoring.memory import MEMORY
from deploy.monitoring.node import NODE
from deploy.monitoring.offload import OFFLOAD
from deploy.monitoring.overview import OVERVIEW

__all__ = ["ALERTS", "DASHBOARDS", "FOLDER", "RULES"]

DASHBOARDS: Final[tuple[Dashboard, ...]] = (OVERVIEW, NODE, LINK, MEMORY, OFFLOAD)
FOLDER: Final = Path(__file__).parent / "dashboards"
"""Of the generated files, each named for its dashboard."""
RULES: Final = Path(__file__).parent / "rules" / "kvferry.yaml"
"""The generated rule file."""
