"""`accredit export`: an adapter of a run as others load it, PEFT folder or merged model, with its model card.

What is written is read again and compared before it gets its name: an adapter by its digest, a merged model by its
log-probs.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from cluster import evaluation
from cluster.adapters import attach, load_model, logprobs, read_adapter, read_version, version_folder
from cluster.canary import judge, tokens_of, tolerance
from cluster.card import card
from cluster.preflight import Inputs, inputs
from configs.schema import RunConfig, load
from credit.adapter import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    folder: Path
    adapter: Adapter
    proof: str  # what the comparison with what was written said


def export(folder: Path, version: str, merge: bool, out: Path) -> Exported:
    """Write a version of the run in `folder` to `out`, which is there whole or not at all.

    Raises ValueError for wrong input, RuntimeError when what was written is not the adapter.
    """
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder}: is no run's folder: it has no config.yaml")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} is there and not empty, expected a new folder")
    source = version_folder(folder, version)
    run = load(folder / "config.yaml")
    run = run.model_copy(update={"name": folder.resolve().name, "out": str(folder.resolve().parent)})
    given = inputs(run, lambda share, text: None)
    config = AutoConfig.from_pretrained(given.model, trust_remote_code=run.model.trust_remote_code)
    vocabulary = config.get_text_config().vocab_size
    adapter = read_version(source, vocabulary)
    adapter.verify()
    unfinished = out.absolute().with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        if merge:
            proof = _merge(run, given, source, unfinished)
        else:
            adapter.save(unfinished)
            written = read_adapter(unfinished, vocabulary).digest
            if written != adapter.digest:
                raise RuntimeError(f"{out}: got digest {written[:12]} back, expected {adapter.digest[:12]}")
            proof = "the digest was read back"
        (unfinished / "README.md").write_text(card(run, adapter, _evaluations(folder, adapter), merge, out.name))
        os.replace(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(folder=out, adapter=adapter, proof=proof)


def _merge(run: RunConfig, given: Inputs, source: Path, out: Path) -> str:
    """Merge in float32, save in the run's dtype, load that and ask it. Returns the verdict; raises Refused.

    A log-prob may be off by a multiple of what the dtype alone costs on the base model.
    """
    prompts = evaluation.heldout_prompts(run, given)
    tokens = tokens_of((prompt.tokens for prompt in prompts), run.model.max_length - 1)
    dtype = getattr(torch, run.model.dtype)
    model = load_model(given.model, run.model, torch.float32)
    base = logprobs(model, tokens)
    lora = attach(model, source)
    adapted = logprobs(lora, tokens)
    lora.merge_and_unload(safe_merge=True).to(dtype).save_pretrained(out)
    del model, lora
    AutoTokenizer.from_pretrained(given.model, trust_remote_code=run.model.trust_remote_code).save_pretrained(out)
    limit = tolerance(logprobs(load_model(given.model, run.model, dtype), tokens), base)
    answer = logprobs(load_model(str(out), run.model, dtype), tokens)
    return f"log-probs of the merged model: {judge(answer, adapted, {'base model': base}, limit)}"


def _evaluations(folder: Path, adapter: Adapter) -> dict[str, evaluation.Report]:
    """What the run measured of this adapter, and before training."""
    reports = {}
    for name, version in (("before", 0), ("this version", adapter.version)):
        path = evaluation.path_of(folder, version)
        if path.exists():
            reports[name] = evaluation.read(path)
    if reports.get("this version", {}).get("digest") != adapter.digest:
        reports.pop("this version", None)  # of other content under the same number
    return reports
