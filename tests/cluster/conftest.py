"""Fixtures of the control plane's tests."""

import pytest

from cluster import pool as pool_module
from tests.cluster.world import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(pool_module, "LOAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 3.0)
    return World()
