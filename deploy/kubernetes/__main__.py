"""``python -m deploy.kubernetes`` writes base/prometheus-rule.yaml from the rule file of deploy/monitoring."""

from __future__ import annotations

from pathlib import Path

from deploy.kubernetes import PROMETHEUS_RULE, RULE_FILE, prometheus_rule

if __name__ == "__main__":
    PROMETHEUS_RULE.write_text(prometheus_rule(RULE_FILE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PROMETHEUS_RULE.relative_to(Path.cwd()) if PROMETHEUS_RULE.is_relative_to(Path.cwd()) else PROMETHEUS_RULE)
