"""What each process of the tests needs. The one that only hands out tests to others imports no torch."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests run side by side
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MTBENCH_LOAD_OF_OTHERS", "")  # so that no command looks at it


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("common_fixtures")
