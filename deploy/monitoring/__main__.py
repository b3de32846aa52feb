"""``python -m deploy.monitoring`` writes deploy/monitoring/dashboards/*.json."""

from deploy.monitoring import DASHBOARDS, FOLDER
from deploy.monitoring.grafana import dashboard_json

if __name__ == "__main__":
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(dashboard_json(dashboard), encoding="utf-8")
