"""The process that runs reward functions for `actors.reward`: `python -m actors.reward_child`.

The first line says which functions. It imports the modules of those functions and nothing heavy.
"""

from typing import Any

from actors.reward_parts import WeightedSum
from actors.serving import serve


def weighted_sum(spec: dict[str, Any]) -> WeightedSum:
    return WeightedSum(spec["parts"], spec["columns"], spec["timeout_s"])


if __name__ == "__main__":
    serve(weighted_sum)
