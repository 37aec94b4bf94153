"""What credit signals cost: `Scorer.score` against two plain forwards of the same model on the same batches.

python -m benchmarks.scorer [--json] [--repeats 5]
"""

import json as jsonlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from actors.demo import make_model
from actors.scorer import Scorer
from benchmarks.machine import describe
from configs.schema import RunConfig
from credit.adapter import Adapter, Canary, digest
from credit.trajectory import Sample

NEEDS = frozenset({"logp", "logp_base", "entropy", "residual"})
SHAPES: dict[str, dict[str, int]] = {
    "demo 0.6M": {},
    "42M": dict(hidden=512, intermediate=1536, layers=12, heads=8, kv_heads=4, vocabulary=8192),
}
LARGE = dict(hidden=512, intermediate=1536, layers=2, heads=8, kv_heads=4, vocabulary=151_936)


def main(json: bool = False, repeats: int = 5, sequences: int = 128) -> dict[str, Any]:
    """Measure speed at the demo's and a 42M shape, and peak memory with a vocabulary of 151,936.

    `sequences` completions of 16 to 40 tokens are scored at a time. Prints a table, or JSON.
    """
    results = {
        "machine": describe(),
        "speed": [_speed(name, shape, repeats, sequences) for name, shape in SHAPES.items()],
        "memory": _memory(),
    }
    if json:
        print(jsonlib.dumps(results, indent=1))
    else:
        _print(results)
    return results


def _speed(name: str, shape: dict[str, int], repeats: int, sequences: int) -> dict[str, Any]:
    scorer, adapter = _scorer(shape)
    rng = np.random.default_rng(0)
    samples = [_sample(adapter, i, int(length)) for i, length in enumerate(rng.integers(16, 41, sequences))]
    inputs: list[torch.Tensor] = []
    hook = scorer.inner.register_forward_pre_hook(lambda _, __, kw: inputs.append(kw["input_ids"]), with_kwargs=True)
    scorer.score(samples, frozenset({"logp"}))
    hook.remove()
    plain, scored = [], []
    for i in range(repeats + 1):
        # alternating, so that a busy neighbour slows both
        plain.append(_seconds(lambda: _plain_forwards(scorer, inputs)))
        scored.append(_seconds(lambda: scorer.score(samples, NEEDS)))
        if i == 0:
            plain, scored = [], []  # warm-up
    tokens = sum(len(sample.tokens) for sample in samples)
    return {
        "shape": name,
        "tokens": tokens,
        "forwards": 2 * len(inputs),
        "padding_share": 1 - tokens / sum(batch.numel() for batch in inputs),
        "plain_tokens_per_s": tokens / statistics.median(plain),
        "score_tokens_per_s": tokens / statistics.median(scored),
        "ratio": statistics.median(plain) / statistics.median(scored),
    }


@torch.inference_mode()
def _plain_forwards(scorer: Scorer, inputs: list[torch.Tensor]) -> None:
    """Adapted and base log-probs of every token, through full logits."""
    for tokens in inputs:
        for version in (1, None):
            scorer.slots.activate(version)
            logits = scorer.model(input_ids=tokens, use_cache=False).logits
            logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).cpu()


def _memory() -> dict[str, Any]:
    """Peak of one `score` over what was there before, against its hidden states and one chunk of logits."""
    scorer, adapter = _scorer(LARGE)
    samples = [_sample(adapter, i, 512) for i in range(8)]
    scorer.score([_sample(adapter, 0, 16)], NEEDS)
    before = _reset_peak()
    seconds = _seconds(lambda: scorer.score(samples, NEEDS))
    peak = _peak() - before
    hidden = 2 * 4096 * scorer.hidden_size * 4  # adapted and base
    chunk = scorer.chunk * scorer.vocabulary * 4
    return {
        "vocabulary": scorer.vocabulary,
        "tokens": 4096,
        "seconds": seconds,
        "peak_bytes": peak,
        "hidden_states_bytes": hidden,
        "chunk_bytes": chunk,
        "full_logits_bytes": 4096 * scorer.vocabulary * 4,
        "ratio": peak / (hidden + chunk),
    }


def _scorer(shape: dict[str, int]) -> tuple[Scorer, Adapter]:
    run = RunConfig.model_validate({"name": "bench", "steps": 1, "data": {"task": "arithmetic"}})
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), **shape)
        scorer = Scorer(run, folder)
        peft = get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder),
            LoraConfig(r=run.lora.r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    rng = np.random.default_rng(0)
    tensors = {
        name.replace(".default", ""): 0.02 * rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
        for name, parameter in peft.named_parameters()
        if "lora_" in name
    }
    config = peft.peft_config["default"].to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    canary = Canary(tokens=[3, 4, 5], adapted=np.zeros(3, np.float32), base=np.zeros(3, np.float32))
    adapter = Adapter(version=1, digest=digest(tensors, config), tensors=tensors, config=config, canary=canary)
    scorer.load(adapter)
    return scorer, adapter


def _sample(adapter: Adapter, index: int, length: int) -> Sample:
    return Sample(
        group=index // 8,
        index=index % 8,
        tokens=np.random.default_rng(index).integers(3, 99, length),
        mask=np.arange(length) >= 8,
        logprobs=np.zeros(length, np.float32),
        text="",
        finish="stop",
        version=adapter.version,
        digest=adapter.digest,
    )


def _seconds(function: Any) -> float:
    started = time.perf_counter()
    function()  # ends with a copy to the CPU, so a GPU has finished too
    return time.perf_counter() - started


def _reset_peak() -> int:
    """Start a new peak; bytes in use now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _print(results: dict[str, Any]) -> None:
    console, machine, memory = Console(), results["machine"], results["memory"]
    table = Table(title="Signals of adapted + base against two plain forwards (tokens/s, medians)")
    for column in ("shape", "tokens", "forwards", "padding", "plain", "Scorer.score", "ratio"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for row in results["speed"]:
        table.add_row(
            row["shape"],
            f"{row['tokens']:,}",
            str(row["forwards"]),
            f"{row['padding_share']:.1%}",
            f"{row['plain_tokens_per_s']:,.0f}",
            f"{row['score_tokens_per_s']:,.0f}",
            f"{row['ratio']:.2f}",
        )
    console.print(table)
    console.print(
        f"Peak memory, {memory['tokens']:,} tokens, vocabulary {memory['vocabulary']:,}: "
        f"{memory['peak_bytes'] / 2**20:.0f} MiB, {memory['ratio']:.2f} x hidden states + one chunk "
        f"({(memory['hidden_states_bytes'] + memory['chunk_bytes']) / 2**20:.0f} MiB); full logits are "
        f"{memory['full_logits_bytes'] / 2**20:,.0f} MiB"
    )
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    console.print(f"{device}, torch {machine['torch']}, {machine['date']}")


if __name__ == "__main__":
    typer.run(main)
