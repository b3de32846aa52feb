"""A browser for the tests of the status page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.page.chromium import Tab, tab


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
