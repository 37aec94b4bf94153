"""trajectories/step-000012.parquet: everything that credit saw and decided, one row per completion."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.loop import Group
from credit.trajectory import Batch, Trajectory


def _turns(trajectory: Trajectory) -> dict[str, list]:
    """The position of each turn's last token, and its reward; nothing without an environment."""
    if not trajectory.turns:
        return {}
    ends, rewards = zip(*((turn.end, turn.reward) for turn in trajectory.turns), strict=True)
    return {"turn_ends": list(ends), "turn_rewards": list(rewards)}


def write(folder: Path, step: int, groups: list[Group], batch: Batch) -> Path:
    """Per-token columns cover the whole sequence, prompt included; signals are 0 where `mask` is false."""
    rows = []
    for group in groups:
        for trajectory, signals in zip(group.trajectories, group.signals, strict=True):
            rows.append(
                {
                    "step": step,
                    "group": trajectory.group,
                    "index": trajectory.index,
                    "prompt": str(group.prompt.prompt),
                    "completion": trajectory.text,
                    "finish": trajectory.finish,
                    "reward": trajectory.reward,
                    "version": trajectory.version,
                    "digest": trajectory.digest,
                    "tokens": trajectory.tokens,
                    "mask": trajectory.mask,
                    "logprobs": trajectory.logprobs,
                    **_turns(trajectory),
                    **{f"signal_{name}": values for name, values in signals.items()},
                }
            )
    rows.sort(key=lambda row: (row["group"], row["index"]))
    for row, advantages, length in zip(rows, batch.advantages, batch.lengths, strict=True):
        row["advantages"] = advantages[: int(length)].numpy()
    path = folder / "trajectories" / f"step-{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
    return path
