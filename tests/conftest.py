"""Which tests are quick, and what every process that a test starts inherits.

Those of folders that start processes for every claim are not quick.
"""

import signal
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW_FOLDERS = ("cli", "demo", "docs", "gates")

# A shell starts what it puts into the background with SIGINT ignored, and every process from there on inherits that:
# a test that interrupts a process would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
