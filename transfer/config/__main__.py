"""``python -m transfer.config`` prints docs/configuration.md."""

import sys

from transfer.config.page import configuration_page

if __name__ == "__main__":
    sys.stdout.write(configuration_page())
