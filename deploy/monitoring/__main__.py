"""``python -m deploy.monitoring`` writes deploy/monitoring/dashboards/*.json and deploy/monitoring/rules/kvferry.yaml."""

import argparse

from deploy.monitoring import ALERTS, DASHBOARDS, FOLDER, RULES
from deploy.monitoring.grafana import dashboard_json
from deploy.monitoring.rule_file import RUNBOOKS_URL, rules_yaml

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m deploy.monitoring", description=__doc__)
    parser.add_argument(
        "--runbooks", metavar="URL", default=RUNBOOKS_URL, help="where you keep docs/runbooks.md (default: %(default)s)"
    )
    runbooks_url: str = parser.parse_args().runbooks
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(dashboard_json(dashboard), encoding="utf-8")
    RULES.write_text(rules_yaml(ALERTS, runbooks_url=runbooks_url), encoding="utf-8")
