"""One record per step, to metrics.jsonl, TensorBoard and Ray's metrics (Prometheus, Grafana, the Ray dashboard)."""

import json
import re
import time
from pathlib import Path
from typing import Any

from ray.util.metrics import Gauge
from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """Names are `area/quantity_unit`; Prometheus sees them as accredit_area_quantity_unit{run=...}."""

    def __init__(self, folder: Path, run: str) -> None:
        self._run = run
        self._file = (folder / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(folder / "tensorboard"))
        self._gauges: dict[str, Gauge] = {}

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Values that are not numbers (a verdict, a digest) go to metrics.jsonl only."""
        self._file.write(json.dumps({"step": step, "time": time.time(), **record}) + "\n")
        for name, value in record.items():
            if not isinstance(value, int | float):
                continue
            self._board.add_scalar(name, value, step)
            if name not in self._gauges:
                flat = "accredit_" + re.sub(r"\W", "_", name)
                self._gauges[name] = Gauge(flat, description=name, tag_keys=("run",))
            self._gauges[name].set(value, {"run": self._run})

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; where a step was run again after a crash, the last one."""
    path = folder / "metrics.jsonl"
    records = (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    )
    return list({(record["step"], "eval/accuracy" in record): record for record in records}.values())
