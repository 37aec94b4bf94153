"""The machine that a figure was measured on, and when."""

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
