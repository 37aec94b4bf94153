"""Fixtures of the control plane's tests."""

from collections.abc import Iterator

import pytest

from cluster import pool as pool_module
from configs.schema import ArithmeticData, RunConfig
from tests.cluster.world import World


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster on this machine."""
    import ray

    from cluster import remote

    remote.connect(RunConfig(name="probe", steps=1, data=ArithmeticData(task="arithmetic")), dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(pool_module, "LOAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 3.0)
    return World()
