"""The model card of an exported adapter: README.md with YAML front matter, as model hubs read it."""

import importlib.metadata
from pathlib import Path
from typing import Any

import yaml

from cluster import evaluation
from configs.schema import RunConfig
from credit.adapter import Adapter

LIBRARIES = ("accredit", "torch", "transformers", "peft", "vllm", "ray", "deepspeed")
PRIVATE = ("out", "name")  # of the configuration: where it ran, not what


def card(run: RunConfig, adapter: Adapter, evaluations: dict[str, evaluation.Report], merged: bool, name: str) -> str:
    """`evaluations` has "before" and "this version", as far as they were made; `name` is the folder's."""
    sections = [
        _front_matter(run, merged),
        f"# {name}",
        _what(run, adapter, merged),
        "## Held-out accuracy\n\n" + _accuracy(run, adapter, evaluations),
        "## Credit\n\n" + _credit(run),
        "## How to load it\n\n" + (_load_merged(name) if merged else _load_adapter(run, name)),
        "## Settings\n\nWhat differs from the defaults:\n\n```yaml\n"
        + yaml.safe_dump(_settings(run), sort_keys=False)
        + "```",
        "## Versions\n\n" + ", ".join(f"{library} {version}" for library, version in _versions().items()) + ".",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(run: RunConfig, merged: bool) -> str:
    fields: dict[str, Any] = {}
    if is_hub_id(run.model.path):
        fields["base_model"] = run.model.path
        fields["base_model_relation"] = "finetune" if merged else "adapter"
    fields["library_name"] = "transformers" if merged else "peft"
    fields["pipeline_tag"] = "text-generation"
    fields["tags"] = ["lora", "reinforcement-learning", "accredit", run.credit.method]
    license_ = "# license: yours to choose, within the terms of the base model and of the data"
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}{license_}\n---"


def is_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).is_dir()


def _what(run: RunConfig, adapter: Adapter, merged: bool) -> str:
    form = "merged into its base model" if merged else "in PEFT's layout"
    made = ", which `accredit train` makes for itself" if run.model.path == "demo" else ""
    return (
        f"A LoRA (rank {adapter.config['r']}, alpha {adapter.config['lora_alpha']:g}) on `{run.model.path}`{made}, "
        f"{form}: version {adapter.version} of {run.steps} of the run `{run.name}`, trained by reinforcement learning "
        f"with credit assigned token by token.\n\n"
        f"Digest of the adapter: `{adapter.digest}`."
    )


def _accuracy(run: RunConfig, adapter: Adapter, evaluations: dict[str, evaluation.Report]) -> str:
    if "this version" not in evaluations:
        return f"Not measured for this version: `accredit eval RUN --version {adapter.version}`."
    report, before = evaluations["this version"], evaluations.get("before")
    names = {"accuracy": f"accuracy, mean of {report['settings']['samples']} per prompt", "greedy": "greedy accuracy"}
    comparable = before is not None and adapter.version > 0 and evaluation.same_rows(report, before)
    changes = evaluation.compare(report, before) if comparable and before else {}
    lines = ["| | before training | this version | change |", "|---|---|---|---|"]
    for name in report["figures"]:
        old = f"{evaluation.figure(before, name)}" if before and name in before["figures"] else "-"
        change = f"{changes[name]:+}" if name in changes else "-"
        lines.append(f"| {names.get(name, name)} | {old} | {evaluation.figure(report, name)} | {change} |")
    limits = (
        f"temperature {run.rollout.temperature:g}, top-p {run.rollout.top_p:g}, at most {run.rollout.max_new_tokens} "
        f"tokens, {report['truncated_share']:.1%} cut off there"
    )
    explained = (
        f"{len(report['prompts'])} held-out prompts, {report['samples']} samples with a reward, "
        f"{sum(report['failed'].values())} without; {limits}. Brackets are 95 % intervals over prompts. A version that "
        "was chosen because it was the best on these prompts is flattered by them."
    )
    return "\n".join(lines) + f"\n\n{explained}"


def _credit(run: RunConfig) -> str:
    method = (
        f"Method `{run.credit.method}` on `{run.credit.advantage}` advantages, sharpening {run.credit.sharpening:g}."
    )
    if run.credit.permute:
        return (
            f"{method} This is the permuted control: the weights were shuffled within each completion, so they are as "
            "concentrated as the method's and stand at no place in particular. What it gains says nothing for the "
            "method's choice of tokens."
        )
    if run.credit.method == "uniform":
        return f"{method} Every token of a completion gets the same credit. The figures above are those of one run."
    return (
        f"{method} The figures above are those of one run. They do not show that *where* the credit went mattered: "
        "compare with `credit.method=uniform` and with the permuted control (`credit.permute=true`) over several "
        "seeds. The control keeps the weights' concentration and moves them elsewhere in the completion, so it says "
        "nothing about what the concentration itself, the reward or the group baseline contribute."
    )


def _load_adapter(run: RunConfig, name: str) -> str:
    base = "BASE" if run.model.path == "demo" else run.model.path
    note = "`BASE` is the folder of the demo's base model, `runs/.models/...`.\n\n" if base == "BASE" else ""
    return f"""{note}```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base}")
model = AutoModelForCausalLM.from_pretrained("{base}", dtype="{run.model.dtype}")
model = PeftModel.from_pretrained(model, "{name}")
```

```bash
vllm serve {base} --enable-lora --max-lora-rank {_served_rank(run.lora.r)} --lora-modules {name}=./{name}
```"""


def _load_merged(name: str) -> str:
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
```

```bash
vllm serve ./{name}
```"""


def _served_rank(rank: int) -> int:
    """vLLM takes powers of two from 8 on, and 1."""
    return 1 if rank == 1 else max(8, 1 << (rank - 1).bit_length())


def _settings(run: RunConfig) -> dict[str, Any]:
    tree = run.model_dump(mode="json", exclude_defaults=True)
    return {name: value for name, value in tree.items() if name not in PRIVATE}


def _versions() -> dict[str, str]:
    known = importlib.metadata.packages_distributions()
    return {library: importlib.metadata.version(known.get(library, [library])[0]) for library in LIBRARIES}
