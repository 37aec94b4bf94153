"""Fixtures that several folders of tests share."""

import os
import tempfile

# before torch, ray or vllm are imported anywhere
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_CACHE", f"{tempfile.gettempdir()}/accredit-tests-datasets")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers with the character tokenizer."""
    from actors.demo import make_model

    folder = tmp_path_factory.mktemp("tiny-model")
    make_model(folder, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1)  # vLLM's smallest head_dim is 32
    return folder
