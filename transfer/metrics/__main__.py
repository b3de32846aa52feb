"""``python -m transfer.metrics`` prints docs/metrics.md."""

import sys

from transfer.metrics.document import metrics_page

if __name__ == "__main__":
    sys.stdout.write(metrics_page())
