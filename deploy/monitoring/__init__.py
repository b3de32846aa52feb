"""What watches a cluster: Grafana dashboards, as code and as the JSON that it gives.

``python -m deploy.monitoring`` writes the JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from deploy.monitoring.charts import Dashboard
from deploy.monitoring.offload import OFFLOAD

DASHBOARDS: Final[tuple[Dashboard, ...]] = (OFFLOAD,)
FOLDER: Final = Path(__file__).parent / "dashboards"
"""Of the generated files, each named for its dashboard."""
