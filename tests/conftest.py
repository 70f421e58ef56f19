"""Which tests are quick: those of folders that start processes for every claim are not."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW_FOLDERS = ("cli", "demo", "docs", "gates")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
