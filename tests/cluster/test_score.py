"""Credit for the user's trajectories, on the real scorer and a real PEFT adapter, through the real command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import credit
from actors.demo import character_tokenizer, make_model
from cluster import score as scoring
from cluster.brought import zero_adapter
from cluster.cli import main
from credit.trajectory import Prompt, Trajectory, pad

METHODS = ["uniform", "surprisal", "divergence", "arca", "forking", "gcpo", "delta", "eapo"]
NEGATIVE = "{{ prompt }}No {{ word }}!"


def save_adapter(model: Path, folder: Path, targets: Any = "all-linear", **settings: Any) -> Path:
    """A random LoRA, written by PEFT."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **settings)
    lora = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    lora.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tiny_model, tmp_path_factory.mktemp("lora"))


def make_rows(groups: int = 3, size: int = 4) -> list[dict[str, Any]]:
    """Completions of different lengths; the rows of a group are not together."""
    rng = np.random.default_rng(0)
    letters = np.array(list("0123456789+=:,"))
    return [
        {
            "prompt": f"{g}+1?",
            "completion": "".join(rng.choice(letters, 3 + int(rng.integers(9)))),
            "reward": float((g + i) % 2),
            "word": f"w{g}",
        }
        for i in range(size)
        for g in range(groups)
    ]


def as_tokens(row: dict[str, Any]) -> dict[str, Any]:
    tokenizer = character_tokenizer()
    prompt, completion = (tokenizer.encode(row[part]) for part in ("prompt", "completion"))
    return {
        "tokens": prompt + completion,
        "mask": [False] * len(prompt) + [True] * len(completion),
        **{name: value for name, value in row.items() if name != "completion"},
    }


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def scored(tmp_path: Path, model: Path, rows: list[Any] | Path, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The report, and the rows of the file that was written."""
    path = rows if isinstance(rows, Path) else write_rows(tmp_path / "rows.jsonl", rows)
    request = scoring.Request(
        **({"trajectories": path, "model": str(model), "out": tmp_path / "out.parquet", "methods": ["arca"]} | settings)
    )
    return scoring.score(request), pq.read_table(request.out).to_pylist()


class Plain:
    """Signals by PEFT's own loading: one unpadded sequence at a time, full logits."""

    def __init__(self, model: Path, adapter: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.lora = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter)).eval()

    @torch.no_grad()
    def forward(self, prompt: list[int], completion: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [C, V] and hidden states [C, H] that predict the completion's tokens."""
        out = self.lora(input_ids=torch.tensor([prompt + completion]), output_hidden_states=True)
        return out.logits[0, len(prompt) - 1 : -1].log_softmax(-1), out.hidden_states[-1][0, len(prompt) - 1 : -1]

    def signals(self, row: dict[str, Any]) -> dict[str, torch.Tensor]:
        """[C] each, `delta_feature` [C, H]."""
        prompt, completion = self.tokenizer.encode(row["prompt"]), self.tokenizer.encode(row["completion"])
        wrong = self.tokenizer.encode(f"{row['prompt']}No {row['word']}!")
        log_probs, hidden = self.forward(prompt, completion)
        with self.lora.disable_adapter():
            base, base_hidden = self.forward(prompt, completion)
        at = (range(len(completion)), completion)
        return {
            "logp": log_probs[at],
            "logp_base": base[at],
            "entropy": -(log_probs.exp() * log_probs).sum(-1),
            "residual": (hidden - base_hidden).norm(dim=-1),
            "logp_negative": self.forward(wrong, completion)[0][at],
            "delta_feature": (1 - log_probs[at].exp())[:, None] * hidden,
        }


@pytest.mark.parametrize("chunk", [1, 1000])
def test_weights_equal_those_of_signals_computed_independently(
    chunk: int, tiny_model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    rows = make_rows()
    settings = {"adapter": adapter, "methods": METHODS, "negative": NEGATIVE, "tokens_per_forward": 16}
    report, out = scored(tmp_path, tiny_model, rows, **settings, options={"q": 0.5}, sharpening=2.0)
    rows = [rows[mine["row"]] for mine in out]
    plain = Plain(tiny_model, adapter)
    expected = [plain.signals(row) for row in rows]
    lengths = [len(row["completion"]) for row in rows]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    signals = {
        name: torch.nn.utils.rnn.pad_sequence([mine[name] for mine in expected], batch_first=True)
        for name in expected[0]
    }
    groups = torch.tensor([int(row["prompt"][0]) for row in rows])
    assert groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4, "the rows of a group are together"
    advantages = credit.advantages("grpo", torch.tensor([row["reward"] for row in rows]), groups)
    np.testing.assert_allclose([mine["advantage"] for mine in out], advantages)
    for name in METHODS:
        p = 2.0 if name in ("surprisal", "divergence", "arca", "forking", "uniform") else 1.0
        options: dict[str, Any] = {"q": 0.5} if name == "forking" else {}
        weights = credit.weights(name, signals, mask, sharpening=p, advantages=advantages, groups=groups, **options)
        for mine, row, length, a in zip(out, weights, lengths, advantages, strict=True):
            got = np.array(mine[f"weights_{name}"])
            assert got.shape == np.shape(mine["tokens"]) and not got[~np.array(mine["mask"])].any()
            np.testing.assert_allclose(got[-length:], row[:length], atol=2e-3, err_msg=name)
            np.testing.assert_allclose(mine[f"advantages_{name}"], got * float(a), atol=1e-6)
    for mine, values in zip(out, expected, strict=True):
        for name in set(values) - {"delta_feature"}:
            got = np.array(mine[f"signal_{name}"])[np.array(mine["mask"])]
            np.testing.assert_allclose(got, values[name], rtol=1e-4, atol=2e-5, err_msg=name)
    assert report["groups"] == 3 and report["tokens"] == sum(lengths) and report["groups_of_one"] == 0


def trajectories_of(out: list[dict[str, Any]]) -> tuple[list[Trajectory], list[dict[str, np.ndarray]]]:
    rows, signals = [], []
    for mine in out:
        arrays = {name: np.array(mine[name]) for name in ("tokens", "mask", "logprobs")}
        fields: dict[str, Any] = {"text": "", "finish": "stop", "version": 1, "digest": "d", "reward": mine["reward"]}
        rows.append(Trajectory(group=mine["group"], index=mine["index"], **arrays, **fields))
        signals.append({name[7:]: np.array(mine[name], np.float32) for name in mine if name.startswith("signal_")})
    return rows, signals


@pytest.mark.parametrize("chunk", [1, 1000])
def test_figures_over_chunks_are_those_of_the_whole_batch(
    chunk: int, tiny_model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    rows = [*make_rows(), {"prompt": "5+1?", "completion": "6", "reward": 1, "word": "w"}]
    settings = {"adapter": adapter, "methods": ["arca", "gcpo"], "negative": NEGATIVE, "tokens_per_forward": 16}
    report, out = scored(tmp_path, tiny_model, rows, **settings)
    for method in ("arca", "gcpo"):
        _, figures = credit.assign(*trajectories_of(out), method=method)
        mine = report["methods"][method]
        assert mine.keys() - {"sign_flip_rate"} == {
            *("gini", "effective_token_ratio", "regime_uniform", "regime_middle", "regime_concentrated"),
            *("position_spearman", "entropy_spearman", "template_share"),
        }
        for name, value in mine.items():
            assert value == pytest.approx(figures[f"credit/{name}"], abs=1e-5), name
    assert "sign_flip_rate" in report["methods"]["gcpo"]
    assert report["groups_of_one"] == 1 and any("1 groups of one" in line for line in report["warnings"])
    assert report["groups_without_signal"] == 1


def test_text_token_and_parquet_inputs_give_the_same_numbers(tiny_model: Path, adapter: Path, tmp_path: Path):
    texts = make_rows()
    tokens = [as_tokens(row) for row in texts]
    parts = [
        {
            "prompt_tokens": [t for t, m in zip(row["tokens"], row["mask"], strict=True) if not m],
            "completion_tokens": [t for t, m in zip(row["tokens"], row["mask"], strict=True) if m],
            "reward": row["reward"],
        }
        for row in tokens
    ]
    pq.write_table(pa.Table.from_pylist(tokens), tmp_path / "rows.parquet")
    settings = {"adapter": adapter, "methods": ["arca", "surprisal"]}
    results = [
        scored(tmp_path, tiny_model, rows, **settings)[1] for rows in (texts, tokens, parts, tmp_path / "rows.parquet")
    ]
    assert results[0] == results[1] == results[2] == results[3]


def test_chat_messages_go_through_the_template_and_finish_stop_adds_eos(tiny_model: Path, tmp_path: Path):
    tokenizer = character_tokenizer()
    completion = {"completion": "2", "reward": 1, "finish": "stop"}
    messages = [{"prompt": [{"role": "user", "content": "1+1?"}], **completion}]
    out = scored(tmp_path, tiny_model, messages)[1][0]
    assert out["tokens"] == [*tokenizer.encode("1+1?\n2"), tokenizer.eos_token_id]
    assert out["mask"] == [False] * 5 + [True] * 2
    plain = scored(tmp_path, tiny_model, [{"prompt": "1+1?", **completion}])[1][0]
    assert plain["tokens"] == [*tokenizer.encode("1+1?2"), tokenizer.eos_token_id]
    chat = scored(tmp_path, tiny_model, [{"prompt": "1+1?", **completion}], chat=True)[1][0]
    assert chat["tokens"] == out["tokens"]


def test_a_run_s_own_file_gives_the_run_s_own_advantages(tiny_model: Path, adapter: Path, tmp_path: Path):
    from cluster.loop import Group
    from cluster.trajectories import write

    first, out = scored(tmp_path, tiny_model, make_rows(), adapter=adapter)
    rows, signals = trajectories_of(out)
    prompts = {row.group: Prompt(group=row.group, tokens=[], seeds=[], prompt="p", columns={}) for row in rows}
    groups = [
        Group(
            rewarded_at=0.0,
            prompt=prompt,
            trajectories=[row for row in rows if row.group == g],
            signals=[mine for row, mine in zip(rows, signals, strict=True) if row.group == g],
        )
        for g, prompt in prompts.items()
    ]
    batch, _ = credit.assign(rows, signals, method="arca", permute=True, seed=5)
    path = write(tmp_path, 1, groups, batch)
    report, again = scored(tmp_path, tiny_model, path, adapter=adapter, permute=True, seed=5)
    advantages = pad([np.array(mine["advantages_arca"]) for mine in again], torch.float32)
    torch.testing.assert_close(advantages, batch.advantages, rtol=1e-4, atol=1e-5)
    assert report["mismatch"]["kl"] == pytest.approx(0, abs=1e-6) and first["mismatch"] is None
    assert any("12 rows were sampled under another adapter" in line for line in report["warnings"])


def test_logprobs_are_compared_and_without_them_logp_is_taken(tiny_model: Path, tmp_path: Path):
    rows = make_rows(groups=1, size=2)
    first, out = scored(tmp_path, tiny_model, rows)
    assert any("2 rows without logprobs" in line for line in first["warnings"])
    for mine in out:
        assert mine["logprobs"] == mine["signal_logp"]
    # one value for each token of the completion; the other row has one for each token of all
    shifted = [[x - 0.5 for x, m in zip(mine["signal_logp"], mine["mask"], strict=True) if m] for mine in out]
    shifted[1] = [0.0] * (len(out[1]["tokens"]) - len(shifted[1])) + shifted[1]
    rows = [row | {"logprobs": values} for row, values in zip(rows, shifted, strict=True)]
    report, _ = scored(tmp_path, tiny_model, rows)
    # logp - logprobs = .5: KL e^.5 - 1 - .5, ratio e^.5
    assert report["mismatch"]["kl"] == pytest.approx(0.1487213, abs=1e-5)
    assert report["mismatch"]["ratio_mean"] == pytest.approx(1.6487213, abs=1e-5)


def test_without_an_adapter_the_base_is_the_policy_and_arca_is_uniform(tiny_model: Path, tmp_path: Path):
    report, out = scored(tmp_path, tiny_model, make_rows(), methods=["arca", "divergence", "surprisal"])
    for mine in out:
        assert not any(mine["signal_residual"]) and mine["signal_logp"] == mine["signal_logp_base"]
        assert mine["weights_arca"] == [float(m) for m in mine["mask"]]
    assert report["methods"]["arca"]["gini"] == 0 < report["methods"]["surprisal"]["gini"]
    assert any("no adapter is given: arca, divergence cannot be but uniform" in line for line in report["warnings"])


def test_a_mask_with_a_tool_s_answer_leaves_it_out(tiny_model: Path, adapter: Path, tmp_path: Path):
    row = as_tokens(make_rows()[0])
    row["mask"][-2] = False
    _, out = scored(tmp_path, tiny_model, [row], adapter=adapter)
    assert out[0]["weights_arca"][-2] == 0 < out[0]["weights_arca"][-1]
    assert sum(out[0]["weights_arca"]) == pytest.approx(sum(row["mask"]))


def test_target_modules_may_be_a_pattern(tiny_model: Path, tmp_path: Path):
    folder = save_adapter(tiny_model, tmp_path / "lora", r".*\.1\.self_attn\.(q|v)_proj")
    report, out = scored(tmp_path, tiny_model, make_rows(), adapter=folder)
    row = make_rows()[out[0]["row"]]
    residual = Plain(tiny_model, folder).signals(row)["residual"]
    np.testing.assert_allclose(out[0]["signal_residual"][-len(residual) :], residual, rtol=1e-4, atol=2e-5)
    assert report["methods"]["arca"]["gini"] > 0


def test_a_run_s_adapter_and_its_digest_are_recognised(tiny_model: Path, tmp_path: Path):
    saved = zero_adapter(str(tiny_model))
    saved.save(tmp_path / "lora")
    rows = [row | {"digest": saved.digest, "version": 0} for row in make_rows()]
    report, _ = scored(tmp_path, tiny_model, rows, adapter=tmp_path / "lora")
    assert not any("another adapter" in line for line in report["warnings"])
    assert any("changes nothing: arca cannot be but uniform" in line for line in report["warnings"])


def test_settings_that_are_not_used_are_said(tiny_model: Path, tmp_path: Path):
    settings: dict[str, Any] = {"methods": ["eapo", "surprisal"], "sharpening": 2.0, "negative": "empty"}
    report, _ = scored(tmp_path, tiny_model, make_rows(), **settings)
    assert any("--sharpening is not for eapo:" in line for line in report["warnings"])
    assert any("--negative is not used" in line for line in report["warnings"])


# The command line


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path) -> Cli:
    """Exit code, stdout and stderr of `accredit score PATH ...`, which writes tmp_path/out.parquet."""

    def run(path: Path, *settings: str) -> tuple[int, str, str]:
        usual = ["--model", str(tiny_model), "--method", "arca", "--out", str(tmp_path / "out.parquet")]
        monkeypatch.setattr(sys, "argv", ["accredit", "score", str(path), *usual, *settings])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


GOOD = {"prompt": "1+1?", "completion": "2", "reward": 1.0}
IDS = {"tokens": [5, 6, 7], "mask": [False, True, True], "reward": 1.0}
BAD_ROWS: dict[str, tuple[Any, list[str]]] = {
    "no reward": ({"prompt": "1", "completion": "2"}, ["reward", "missing"]),
    "reward not finite": (GOOD | {"reward": float("nan")}, ["reward", "nan", "finite"]),
    "reward no number": (GOOD | {"reward": "1"}, ["reward", "'1'"]),
    "no prompt": ({"completion": "2", "reward": 1}, ["prompt", "missing"]),
    "no completion": ({"prompt": "2", "reward": 1}, ["completion", "missing"]),
    "prompt no text": (GOOD | {"prompt": 5}, ["prompt", "'5'", "text"]),
    "empty prompt": (GOOD | {"prompt": ""}, ["prompt", "zero tokens"]),
    "empty completion": (GOOD | {"completion": ""}, ["completion", "zero tokens"]),
    "empty mask": (IDS | {"mask": [False] * 3}, ["mask", "zero tokens"]),
    "no mask": ({"tokens": [5, 6], "reward": 1}, ["mask", "missing"]),
    "short mask": (IDS | {"mask": [False, True]}, ["mask", "got 2", "3"]),
    "mask on the first token": (IDS | {"mask": [True] * 3}, ["tokens", "first token"]),
    "no prompt tokens": ({"completion_tokens": [5], "reward": 1}, ["prompt_tokens", "missing"]),
    "tokens no integers": (IDS | {"tokens": [5, 6.5, 7]}, ["tokens", "6.5", "token ids"]),
    "beyond the vocabulary": (IDS | {"tokens": [5, 6, 999]}, ["tokens", "999", "position 2", "vocabulary"]),
    "beyond the context": (GOOD | {"completion": "1" * 2050}, ["completion", "2054", "2048", "context"]),
    "logprobs of another length": (IDS | {"logprobs": [1.0] * 4}, ["logprobs", "got 4", "3", "2"]),
    "logprobs not finite": (IDS | {"logprobs": [0, -1, float("inf")]}, ["logprobs", "infinite"]),
    "group of another type": (GOOD | {"group": 3}, ["group", "3", "nothing"]),
    "negative index": (GOOD | {"index": -1}, ["index", "-1"]),
    "no JSON": ("{prompt", ["no JSON"]),
    "no object": ("[1]", ["list", "object"]),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_one_line_with_file_line_and_field(case: str, cli: Cli, tmp_path: Path):
    row, words = BAD_ROWS[case]
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, "", row])
    code, out, err = cli(path)
    assert f"{path}: line 3: " in err and err.count("\n") == 1 and all(word in err for word in words), err
    assert code == 2 and not out and not list(tmp_path.glob("*.parquet*"))


def other_base(folder: Path) -> Path:
    make_model(folder / "base", hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1)
    return save_adapter(folder / "base", folder / "lora")


def other_vocabulary(folder: Path) -> Path:
    make_model(folder / "base", hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1, vocabulary=200)
    return save_adapter(folder / "base", folder / "lora", modules_to_save=["lm_head"])


def trained_embeddings(folder: Path) -> Path:
    make_model(folder / "base", hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1)
    return save_adapter(folder / "base", folder / "lora", modules_to_save=["embed_tokens"])


def pickled(folder: Path) -> Path:
    (folder / "adapter_model.bin").write_bytes(b"")
    return folder


def damaged(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    return folder


def no_lora(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return folder


ADAPTERS = {
    "other base": (other_base, ["wrong shape", "32", "64", "base model"]),
    "other vocabulary": (other_vocabulary, ["lm_head", "200", "vocabulary"]),
    "trained embeddings": (trained_embeddings, ["embed_tokens", "no LoRA factor"]),
    "pickle": (pickled, ["adapter_model.bin", "pickle"]),
    "damaged": (damaged, ["adapter_model.safetensors"]),
    "no LoRA": (no_lora, ["peft_type", "IA3"]),
    "nothing": (lambda folder: folder, ["adapter_config.json"]),
    "no folder": (lambda folder: folder / "nowhere", ["nowhere", "no folder"]),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_bad_adapter_is_refused_in_one_line(case: str, cli: Cli, tmp_path: Path):
    make, words = ADAPTERS[case]
    code, _, err = cli(write_rows(tmp_path / "rows.jsonl", [GOOD]), "--adapter", str(make(tmp_path)))
    line = err.strip().splitlines()[-1]
    assert line.startswith("accredit: ") and all(word in line for word in words), line
    assert code == 2 and not (tmp_path / "out.parquet").exists()


SETTINGS = {
    "unknown method": (["--method", "arcana"], ["arcana", "uniform"]),
    "method twice": (["--method", "arca,arca"], ["--method", "arca,arca"]),
    "ibpo": (["--method", "ibpo"], ["ibpo", "run only"]),
    "unknown advantage": (["--advantage", "ppo"], ["ppo", "grpo"]),
    "unknown option": (["--option", "q=1"], ["--option", "'q'", "arca"]),
    "option without a value": (["--option", "q"], ["--option", "key=value"]),
    "bad option": (["--method", "forking", "--option", "q=2"], ["forking", "q", "2"]),
    "no negative": (["--method", "gcpo"], ["credit.negative", "gcpo"]),
    "negative renders empty": (["--method", "gcpo", "--negative", "{{ '' }}"], ["line 1", "renders empty"]),
    "negative with an unknown column": (["--method", "gcpo", "--negative", "{{ x }}"], ["line 1", "x"]),
    "negative too long": (["--method", "gcpo", "--negative", "{{ 'x' * 2048 }}"], ["line 1", "negative", "2049"]),
    "sharpening": (["--sharpening", "0"], ["sharpening", "0"]),
    "temperature": (["--temperature", "3"], ["--temperature", "3"]),
    "dtype": (["--dtype", "int8"], ["--dtype", "int8"]),
    "tokens per forward": (["--tokens-per-forward", "0"], ["--tokens-per-forward", "0"]),
    "seed": (["--seed", "-1"], ["--seed", "-1"]),
    "out": (["--out", "credit.csv"], ["--out", ".parquet"]),
    "out in no folder": (["--out", "no/where/credit.parquet"], ["--out", "no/where"]),
    "model": (["--model", "./nowhere"], ["--model", "nowhere"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_bad_setting_is_refused_in_one_line(case: str, cli: Cli, tmp_path: Path):
    settings, words = SETTINGS[case]
    code, _, err = cli(write_rows(tmp_path / "rows.jsonl", [GOOD, GOOD | {"reward": 0}]), *settings)
    (line,) = err.strip().splitlines()
    assert all(word in line for word in words), line
    assert code == 2 and not list(tmp_path.glob("*.parquet*"))


def test_an_index_that_is_there_twice_is_refused(tiny_model: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"line 2: index: 3 is there twice in group 'a'"):
        scored(tmp_path, tiny_model, [GOOD | {"group": "a", "index": 3}] * 2)


def test_signals_that_are_not_finite_end_in_one_line_and_no_file(cli: Cli, tiny_model: Path, tmp_path: Path):
    adapter = zero_adapter(str(tiny_model))
    for tensor in adapter.tensors.values():
        tensor[:] = np.inf
    adapter.save(tmp_path / "lora")
    code, _, err = cli(write_rows(tmp_path / "rows.jsonl", [GOOD]), "--adapter", str(tmp_path / "lora"))
    line = err.strip().splitlines()[-1]
    assert code == 1 and line.startswith("accredit: ") and "not finite" in line, line
    assert not list(tmp_path.glob("*.parquet*")) and not list(tmp_path.glob(".*"))


FILES = {
    "missing": (lambda folder: folder / "no.jsonl", ["no.jsonl", "no such file"]),
    "empty": (lambda folder: write_rows(folder / "a.jsonl", []), ["a.jsonl", "no rows"]),
    "ending": (lambda folder: write_rows(folder / "a.csv", [GOOD]), ["a.csv", ".jsonl or .parquet"]),
    "no parquet": (lambda folder: write_rows(folder / "a.parquet", [GOOD]), ["a.parquet", "Parquet"]),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_refused_in_one_line(case: str, cli: Cli, tmp_path: Path):
    make, words = FILES[case]
    code, _, err = cli(make(tmp_path))
    (line,) = err.strip().splitlines()
    assert code == 2 and all(word in line for word in words), line


def test_json_is_all_that_goes_to_stdout(tiny_model: Path, adapter: Path, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", make_rows())
    command = [sys.executable, "-m", "cluster.cli", "score", str(path), "--model", str(tiny_model)]
    command += ["--adapter", str(adapter), "--method", "uniform, arca", "--out", str(tmp_path / "out.parquet")]
    answer = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["methods"]["uniform"]["gini"] == 0 < report["methods"]["arca"]["gini"]
    assert "warning" in answer.stderr and "12 rows without logprobs" in answer.stderr


def test_the_table_has_a_column_for_each_method(cli: Cli, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", make_rows())
    code, shown, _ = cli(path, "--method", "surprisal,gcpo", "--negative", "empty")
    assert code == 0 and all(
        word in shown for word in ("surprisal", "gcpo", "gini", "sign flip rate", "template share")
    )
