"""Credit for the user's trajectories, on the real scorer and a real PEFT adapter."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import credit
from actors.demo import character_tokenizer
from cluster import score as scoring
from cluster.adapters import zero_adapter
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


def test_an_index_that_is_there_twice_is_refused(tiny_model: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"line 2: index: 3 is there twice in group 'a'"):
        scored(tmp_path, tiny_model, [make_rows()[0] | {"group": "a", "index": 3}] * 2)
