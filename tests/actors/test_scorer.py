"""The scorer against a plain computation: PEFT's own loading, one unpadded sequence at a time, full logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from actors.demo import make_model
from actors.scorer import PADDING_PER_FORWARD, Scorer
from configs.schema import RunConfig
from credit.adapter import Adapter, Canary, digest
from credit.trajectory import Sample

ALL = frozenset({"logp", "logp_base", "entropy", "residual"})
CANARY = [5, 17, 40, 41, 9]


def run_config(**overrides: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "name": "t",
        "steps": 1,
        "data": {"task": "arithmetic"},
        "max_staleness": 1,
        "lora": {"r": 4},
    }
    return RunConfig.model_validate(tree | overrides)


def make_adapter(model: Path, version: int, *, scale: float = 0.3, r: int = 4) -> Adapter:
    """Version 0 is fresh (B = 0); the others are random, and far enough from the base to change its log-probs."""
    base = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(r=r, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(base, config)
    rng = np.random.default_rng(version)
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            value = rng.normal(size=tuple(parameter.shape)).astype(np.float32) * scale
            tensors[name.replace(".default", "")] = value * (version > 0) if "lora_B" in name else value
    written = peft.peft_config["default"].to_dict()
    written["target_modules"] = sorted(written["target_modules"])
    canary = Canary(tokens=CANARY, adapted=np.zeros(5, np.float32), base=np.zeros(5, np.float32))
    return Adapter(version=version, digest=digest(tensors, written), tensors=tensors, config=written, canary=canary)


def make_sample(adapter: Adapter, index: int, *, length: int, group: int = 0, turns: bool = False) -> Sample:
    """8 prompt tokens, then policy tokens; with `turns`, three tokens of a tool's answer in between."""
    rng = np.random.default_rng(100 * group + index)
    mask = np.arange(length) >= 8
    if turns:
        mask[12:15] = False
    return Sample(
        group=group,
        index=index,
        tokens=rng.integers(3, 90, length),
        mask=mask,
        logprobs=np.zeros(length, np.float32),
        text="",
        finish="stop",
        version=adapter.version,
        digest=adapter.digest,
    )


class Reference:
    """Plain PEFT, one sequence per forward, no padding, float64 head."""

    def __init__(self, model: Path, adapter: Adapter, folder: Path) -> None:
        adapter.save(folder)
        self.peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder)).eval()

    @torch.no_grad()
    def outputs(self, tokens: np.ndarray, *, base: bool = False) -> Any:
        ids = torch.from_numpy(tokens)[None]
        if base:
            with self.peft.disable_adapter():
                return self.peft(input_ids=ids, output_hidden_states=True)
        return self.peft(input_ids=ids, output_hidden_states=True)

    def log_probs(self, tokens: np.ndarray, temperature: float = 1.0, *, base: bool = False) -> torch.Tensor:
        """[T, V] float64; row t is the distribution that token t was drawn from; row 0 is not used."""
        logits = self.outputs(tokens, base=base).logits[0].double() / temperature
        return torch.cat([torch.zeros(1, logits.shape[1]).double(), torch.log_softmax(logits[:-1], dim=-1)])

    def logp(self, tokens: np.ndarray, temperature: float = 1.0, *, base: bool = False) -> np.ndarray:
        return self.log_probs(tokens, temperature, base=base)[range(len(tokens)), tokens].numpy()

    def states(self, tokens: np.ndarray, layer: int = -1, *, base: bool = False) -> np.ndarray:
        """[T, H]: row t predicts token t. `layer` as transformers counts its hidden states."""
        states = self.outputs(tokens, base=base).hidden_states[layer][0].double().numpy()
        return np.concatenate([np.zeros((1, states.shape[1])), states[:-1]])


@pytest.fixture(scope="module")
def adapters(tiny_model: Path) -> list[Adapter]:
    return [make_adapter(tiny_model, version) for version in range(4)]


@pytest.fixture(scope="module")
def references(tiny_model: Path, adapters: list[Adapter], tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return [Reference(tiny_model, a, tmp_path_factory.mktemp(f"v{a.version}")) for a in adapters[:3]]


@pytest.fixture
def scorer(tiny_model: Path, adapters: list[Adapter]) -> Scorer:
    """Versions 0, 1 and 2 fill its three slots; temperature 0.7."""
    scorer = Scorer(run_config(rollout={"temperature": 0.7}), str(tiny_model))
    for adapter in adapters[:3]:
        scorer.load(adapter)
    return scorer


def close(actual: np.ndarray, expected: np.ndarray, mask: np.ndarray, tolerance: float = 1e-5) -> None:
    assert actual.dtype == np.float32 and actual.shape == mask.shape
    assert np.all(actual[~mask] == 0)
    np.testing.assert_allclose(actual[mask], expected[mask], rtol=tolerance, atol=tolerance)


def test_signals_equal_a_plain_computation_and_every_sample_is_scored_under_its_own_version(
    scorer: Scorer, adapters: list[Adapter], references: list[Reference]
) -> None:
    lengths = [12, 30, 21, 13, 40, 22]
    samples = [make_sample(adapters[i % 3], i, length=n, turns=i > 3) for i, n in enumerate(lengths)]
    for sample, signals in zip(samples, scorer.score(samples, ALL), strict=True):
        reference = references[sample.version]
        log_probs = reference.log_probs(sample.tokens, 0.7).numpy()
        difference = reference.states(sample.tokens) - reference.states(sample.tokens, base=True)
        assert signals.keys() == ALL
        close(signals["logp"], reference.logp(sample.tokens, 0.7), sample.mask)
        close(signals["logp_base"], reference.logp(sample.tokens, 0.7, base=True), sample.mask)
        close(signals["entropy"], -(np.exp(log_probs) * log_probs).sum(-1), sample.mask)
        close(signals["residual"], np.sqrt((difference**2).sum(-1)), sample.mask)
    different = [make_sample(adapters[v], 0, length=30) for v in (1, 2)]
    one, two = scorer.score(different, ALL)
    assert np.abs(one["logp"] - two["logp"]).max() > 0.1, "the versions are told apart"


def test_version_zero_has_exactly_no_residual_and_no_divergence(scorer: Scorer, adapters: list[Adapter]) -> None:
    for signals in scorer.score([make_sample(adapters[0], i, length=20 + i) for i in range(4)], ALL):
        assert not signals["residual"].any()
        assert np.array_equal(signals["logp"], signals["logp_base"]) and signals["logp"].any()


@pytest.mark.parametrize(("layer", "norm", "relative"), [(-1, "pre", False), (0, "pre", True), (0, "post", False)])
def test_the_residual_follows_its_options(
    tiny_model: Path, adapters: list[Adapter], references: list[Reference], layer: int, norm: str, relative: bool
) -> None:
    credit = {"residual_layer": layer, "residual_norm": norm, "residual_relative": relative}
    scorer = Scorer(run_config(credit=credit), str(tiny_model))
    scorer.load(adapters[1])
    sample = make_sample(adapters[1], 0, length=25)
    reference = references[1]
    captured: list[torch.Tensor] = []
    model: Any = reference.peft.get_base_model()
    inner = model.model
    hook = inner.layers[layer].register_forward_hook(lambda _, __, output: captured.append(output))
    reference.outputs(sample.tokens)
    reference.outputs(sample.tokens, base=True)
    hook.remove()
    adapted, base = (inner.norm(state) if norm == "post" else state for state in captured)
    distance = (adapted - base)[0].norm(dim=-1) / (base[0].norm(dim=-1) if relative else 1)
    expected = np.concatenate([[0], distance.detach().numpy()[:-1]])
    close(scorer.score([sample], ALL)[0]["residual"], expected, sample.mask)


def test_signals_do_not_depend_on_batching_or_on_the_chunks_of_the_head(
    tiny_model: Path, scorer: Scorer, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [make_sample(adapters[i % 3], i, length=12 + 5 * i) for i in range(9)]
    needs, negatives = ALL | {"logp_negative", "kl_negative"}, {0: [4, 8, 15, 16, 23, 42]}
    together = scorer.score(samples, needs, negatives)
    alone = [scorer.score([sample], needs, negatives)[0] for sample in samples]
    monkeypatch.setattr(scorer, "chunk", 3)
    monkeypatch.setattr(scorer, "block", 2)
    chunked = scorer.score(samples, needs, negatives)
    tight = Scorer(run_config(rollout={"temperature": 0.7}, credit={"tokens_per_forward": 60}), str(tiny_model))
    for adapter in adapters[:3]:
        tight.load(adapter)
    for other in (alone, chunked, tight.score(samples, needs, negatives)):
        for a, b in zip(together, other, strict=True):
            for name in needs:
                np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_same_samples_give_the_same_bits_in_any_order(scorer: Scorer, adapters: list[Adapter]) -> None:
    samples = [make_sample(adapters[i % 3], i, length=12 + (7 * i) % 11) for i in range(9)]
    first, again, backwards = (scorer.score(s, ALL) for s in (samples, samples, samples[::-1]))
    for a, b, c in zip(first, again, backwards[::-1], strict=True):
        assert all(np.array_equal(a[name], b[name]) and np.array_equal(a[name], c[name]) for name in ALL)


def test_no_forward_is_larger_than_the_budget_and_little_of_it_is_padding(
    tiny_model: Path, adapters: list[Adapter]
) -> None:
    scorer = Scorer(run_config(credit={"tokens_per_forward": 1000}), str(tiny_model))
    scorer.load(adapters[1])
    shapes: list[torch.Size] = []
    scorer.inner.register_forward_pre_hook(lambda _, __, kw: shapes.append(kw["input_ids"].shape), with_kwargs=True)
    rng = np.random.default_rng(0)
    samples = [make_sample(adapters[1], i, length=int(n)) for i, n in enumerate([1200, *rng.integers(10, 500, 40)])]
    scorer.score(samples, frozenset({"logp"}))
    sizes = sorted(shape.numel() for shape in shapes)
    assert sizes[-1] == 1200 and sizes[-2] <= 1000, "only a sequence that is too long by itself exceeds the budget"
    assert sum(sizes) - sum(len(s.tokens) for s in samples) <= PADDING_PER_FORWARD[scorer.device.type] * len(sizes)


@pytest.mark.parametrize(
    ("needs", "forwards"),
    [
        ({"logp"}, 1),
        ({"logp", "entropy", "delta_feature"}, 1),
        ({"logp", "logp_base"}, 2),
        ({"residual"}, 2),
        ({"logp_negative"}, 2),
        ({"kl_negative", "residual", "logp_base"}, 3),
    ],
)
def test_only_the_forwards_that_are_needed_run(
    scorer: Scorer, adapters: list[Adapter], needs: set[str], forwards: int
) -> None:
    calls: list[int] = []
    scorer.inner.register_forward_hook(lambda *_: calls.append(1))
    signals = scorer.score([make_sample(adapters[1], i, length=20) for i in range(3)], frozenset(needs), {0: [1, 2, 3]})
    assert len(calls) == forwards
    assert signals[0].keys() == (needs | {"logp"}) - {"delta_feature"}


def test_a_negative_prompt_replaces_all_before_the_first_policy_token(
    scorer: Scorer, adapters: list[Adapter], references: list[Reference]
) -> None:
    sample = make_sample(adapters[2], 3, length=30, turns=True)
    prompt = [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60]
    signals = scorer.score([sample], frozenset({"logp_negative", "kl_negative"}), {0: prompt})[0]
    negative = np.concatenate([prompt, sample.tokens[8:]])
    log_p = references[2].log_probs(sample.tokens, 0.7).numpy()[8:]
    log_q = references[2].log_probs(negative, 0.7).numpy()[len(prompt) :]
    kl = np.concatenate([np.zeros(8), (np.exp(log_p) * (log_p - log_q)).sum(-1)])
    logp = np.concatenate([np.zeros(8), references[2].logp(negative, 0.7)[len(prompt) :]])
    assert not sample.mask[12:15].any()
    close(signals["logp_negative"], logp, sample.mask)
    close(signals["kl_negative"], kl, sample.mask)
    assert kl.max() > 0.05


def test_a_negative_prompt_equal_to_the_prompt_changes_nothing(scorer: Scorer, adapters: list[Adapter]) -> None:
    samples = [make_sample(adapters[1], i, length=20 + i) for i in range(4)]
    for sample in samples:
        sample.tokens[:8] = samples[0].tokens[:8]
    for signals in scorer.score(
        samples, frozenset({"logp_negative", "kl_negative"}), {0: samples[0].tokens[:8].tolist()}
    ):
        assert np.array_equal(signals["logp_negative"], signals["logp"])
        assert not signals["kl_negative"].any()


def test_a_missing_negative_prompt_and_an_unknown_signal_are_refused(scorer: Scorer, adapters: list[Adapter]) -> None:
    sample = make_sample(adapters[1], 0, length=20, group=7)
    with pytest.raises(ValueError, match="no negative prompt for group 7"):
        scorer.score([sample], frozenset({"logp_negative"}), {6: [1, 2]})
    with pytest.raises(ValueError, match=r"got \['logits'\], expected some of"):
        scorer.score([sample], frozenset({"logits"}))


def test_delta_sums_and_dots_equal_those_of_explicit_features(
    scorer: Scorer, adapters: list[Adapter], references: list[Reference]
) -> None:
    samples = [make_sample(adapters[1 + i % 2], i, length=15 + 4 * i, group=i // 2, turns=i == 3) for i in range(4)]
    rng = np.random.default_rng(5)
    coefficients, features = {}, {}
    for sample in samples:
        reference = references[sample.version]
        v_TH = (1 - np.exp(reference.logp(sample.tokens, 0.7)))[:, None] * reference.states(sample.tokens)
        key = (sample.group, sample.index)
        features[key] = np.where(sample.mask[:, None], v_TH, 0)
        coefficients[key] = (rng.normal(size=len(sample.tokens)) * sample.mask).astype(np.float32)
    for sample in samples:  # over several calls
        scorer.score([sample], frozenset({"delta_feature"}))
    expected_positive, expected_negative = np.zeros(64), np.zeros(64)
    for key, c_T in coefficients.items():
        for c, v in zip(c_T, features[key], strict=True):
            if c > 0:
                expected_positive += c * v
            else:
                expected_negative += -c * v
    positive, negative = scorer.delta_sums(coefficients)
    assert positive.dtype == negative.dtype == np.float32
    np.testing.assert_allclose(positive, expected_positive, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(negative, expected_negative, rtol=1e-5, atol=1e-4)
    direction = rng.normal(size=64).astype(np.float32)
    dots = scorer.delta_dots(direction, list(features))
    for sample in samples:
        key = (sample.group, sample.index)
        close(dots[key], features[key] @ direction, sample.mask, tolerance=1e-4)
    scorer.delta_clear([(0, 0), (9, 9)])
    with pytest.raises(RuntimeError, match="sample 0/0: no DelTA feature"):
        scorer.delta_sums(coefficients)
    scorer.unload(1)
    assert scorer.features.keys() == {("", 0, 1), ("", 1, 3)}, "samples of version 2"
    with pytest.raises(RuntimeError, match="sample 1/2: no DelTA feature"):
        scorer.delta_dots(direction, [(1, 2)])


def test_the_noise_floor_is_small_but_measured_in_another_batch_shape(
    tiny_model: Path, adapters: list[Adapter]
) -> None:
    run = run_config(credit={"noise_floor": True}, model={"dtype": "bfloat16"})
    scorer = Scorer(run, str(tiny_model))
    scorer.load(adapters[1])
    shapes: list[torch.Size] = []
    scorer.inner.register_forward_pre_hook(lambda _, __, kw: shapes.append(kw["input_ids"].shape), with_kwargs=True)
    samples = [make_sample(adapters[1], i, length=30 + i) for i in range(4)]
    for sample, signals in zip(samples, scorer.score(samples, frozenset({"residual"})), strict=True):
        assert signals.keys() == {"logp", "residual", "residual_noise"}
        assert signals["residual_noise"].max() < 0.1 * signals["residual"][sample.mask].min()
    assert shapes[:2] == [torch.Size([4, 33])] * 2 and shapes[2:] == [torch.Size([1, n + 1]) for n in (30, 31, 32, 33)]


def test_a_bfloat16_base_is_scored_with_float32_lora(
    tiny_model: Path, adapters: list[Adapter], references: list[Reference]
) -> None:
    scorer = Scorer(run_config(model={"dtype": "bfloat16"}), str(tiny_model))
    scorer.load(adapters[0])
    scorer.load(adapters[1])
    assert {t.dtype for t in scorer.slots.tensors[1].values()} == {torch.float32}
    fresh, trained = scorer.score([make_sample(adapters[v], v, length=30) for v in (0, 1)], ALL)
    assert not fresh["residual"].any() and np.array_equal(fresh["logp"], fresh["logp_base"])
    sample = make_sample(adapters[1], 1, length=30)
    close(trained["logp"], references[1].logp(sample.tokens), sample.mask, tolerance=0.1)


def test_load_answers_the_canary_at_temperature_one(
    scorer: Scorer, references: list[Reference], adapters: list[Adapter]
) -> None:
    for version in (0, 1, 2):
        answer = scorer.canary(CANARY, version)
        assert answer[0] == 0 and answer.dtype == np.float32
        np.testing.assert_allclose(answer[1:], references[version].logp(np.array(CANARY))[1:], rtol=1e-5, atol=1e-5)
        assert np.array_equal(scorer.load(adapters[version]), answer), "loading a resident version again is harmless"
    base = references[1].logp(np.array(CANARY), base=True)
    np.testing.assert_allclose(scorer.canary(CANARY, None)[1:], base[1:], rtol=1e-5, atol=1e-5)


def test_tensors_arrive_bit_for_bit(scorer: Scorer, adapters: list[Adapter]) -> None:
    for adapter in adapters[:3]:
        slot, _ = scorer.slots.resident["", adapter.version]
        resident = scorer.slots.tensors[slot]
        assert resident.keys() == adapter.tensors.keys()
        assert all(np.array_equal(resident[name].cpu().numpy(), tensor) for name, tensor in adapter.tensors.items())


def renewed(adapter: Adapter, tensors: dict[str, np.ndarray]) -> Adapter:
    return replace(adapter, tensors=tensors, digest=digest(tensors, adapter.config))


def test_a_damaged_or_foreign_adapter_is_refused_and_the_slot_stays_free(
    tiny_model: Path, adapters: list[Adapter]
) -> None:
    scorer = Scorer(run_config(), str(tiny_model))
    good = adapters[1]
    name = min(good.tensors)
    less = {key: tensor for key, tensor in good.tensors.items() if key != name}
    with pytest.raises(ValueError, match="does not match its digest"):
        scorer.load(replace(good, tensors=less))
    with pytest.raises(ValueError, match=f"1 tensors are missing, as {name}"):
        scorer.load(renewed(good, less))
    with pytest.raises(ValueError, match=r"config does not describe the tensors.*modules.*'extra'"):
        scorer.load(renewed(good, good.tensors | {"base.extra": np.zeros(4, np.float32)}))
    with pytest.raises(ValueError, match=r"config does not describe the tensors, got r=4.*expected ranks \[4, 5\]"):
        scorer.load(renewed(good, good.tensors | {name: np.zeros((5, good.tensors[name].shape[1]), np.float32)}))
    with pytest.raises(ValueError, match="vocabulary of 99"):
        scorer.load(replace(good, canary=replace(good.canary, tokens=[4, 99])))
    with pytest.raises(ValueError, match=r"config differs from the first adapter's in \['r'\]"):
        scorer.load(make_adapter(tiny_model, 1, r=8))
    assert scorer.stats()["resident"] == []
    scorer.load(good)
    assert scorer.stats()["resident"] == [1]


def test_an_adapter_of_another_hidden_size_is_refused(tiny_model: Path, adapters: list[Adapter]) -> None:
    wide = {
        name: np.zeros((tensor.shape[0], 96), np.float32) if tensor.shape[1] == 64 else tensor
        for name, tensor in adapters[1].tensors.items()
    }
    with pytest.raises(ValueError, match=r"got \(4, 96\), expected \(4, 64\): its rank or its base model's sizes"):
        Scorer(run_config(), str(tiny_model)).load(renewed(adapters[1], wide))


def test_slots_are_bounded_and_an_unloaded_version_frees_its_own(scorer: Scorer, adapters: list[Adapter]) -> None:
    with pytest.raises(RuntimeError, match=r"adapter v3: got a new version with \[v0, v1, v2\] resident"):
        scorer.load(adapters[3])
    scorer.unload(1)
    with pytest.raises(RuntimeError, match=r"adapter v1: not resident, expected one of \[v0, v2\]"):
        scorer.score([make_sample(adapters[1], 0, length=20)], ALL)
    with pytest.raises(RuntimeError, match="not resident"):
        scorer.unload(1)
    before = scorer.score([make_sample(adapters[2], 0, length=20)], ALL)[0]
    scorer.load(adapters[3])
    assert scorer.stats()["resident"] == [0, 2, 3]
    after = scorer.score([make_sample(adapters[2], 0, length=20)], ALL)[0]
    assert all(np.array_equal(before[name], after[name]) for name in ALL), "the other versions are untouched"


def test_a_version_is_never_replaced_and_its_samples_must_carry_its_digest(
    scorer: Scorer, adapters: list[Adapter]
) -> None:
    with pytest.raises(RuntimeError, match="resident with another digest"):
        scorer.load(replace(adapters[3], version=1))
    with pytest.raises(RuntimeError, match="sample 0/4: sampled under another v1"):
        scorer.score([replace(make_sample(adapters[1], 4, length=20), digest="0" * 64)], ALL)


def test_memory_stays_flat_over_many_versions(tiny_model: Path) -> None:
    scorer, adapter = Scorer(run_config(), str(tiny_model)), make_adapter(tiny_model, 0, r=64)
    sizes = []
    for version in range(200):
        scorer.load(replace(adapter, version=version))
        scorer.unload(version)
        sizes.append(scorer.stats()["rss_bytes"])
    assert sizes[-1] - sizes[99] < 100 * adapter.nbytes / 4, "a quarter of what a leak would add"


def test_logits_that_are_not_finite_name_the_sample_and_keep_no_feature(
    tiny_model: Path, adapters: list[Adapter]
) -> None:
    scorer = Scorer(run_config(), str(tiny_model))
    broken = {name: np.full_like(tensor, np.inf) for name, tensor in adapters[1].tensors.items()}
    adapter = renewed(adapters[1], broken)
    scorer.load(adapter)
    with pytest.raises(FloatingPointError, match="sample 4/2: logp is not finite"):
        scorer.score([make_sample(adapter, 2, length=20, group=4)], frozenset({"logp", "delta_feature"}))
    assert scorer.features == {}


def test_a_residual_layer_that_does_not_exist_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"residual_layer: got 2, expected -2 to 1"):
        Scorer(run_config(credit={"residual_layer": 2}), str(tiny_model))


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=0.1,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="logits of Gemma2ForCausalLM are not its LM head"):
        Scorer(run_config(), str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads the peak of the process's own memory")
@pytest.mark.parametrize("needs", [ALL, frozenset({"kl_negative"})])
def test_memory_peaks_at_one_chunk_of_logits_and_not_at_all_of_them(tmp_path: Path, needs: frozenset[str]) -> None:
    make_model(tmp_path, hidden=64, intermediate=128, layers=1, vocabulary=151_936)
    scorer, adapter = Scorer(run_config(), str(tmp_path)), make_adapter(tmp_path, 1)
    scorer.load(adapter)
    scorer.chunk, scorer.block = 64, 4
    full = 512 * 151_936 * 4  # 311 MB; a chunk is an eighth of it, and what torch keeps for itself varies by some MB
    scorer.score([make_sample(adapter, 0, length=64)], needs, {0: [1, 2, 3]})  # what only the first call allocates
    before = scorer.stats()["rss_bytes"]
    Path("/proc/self/clear_refs").write_text("5")  # starts a new peak
    scorer.score([make_sample(adapter, 0, length=512)], needs, {0: [1, 2, 3]})
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    assert peak - before < full / 2


def test_stats_count_the_tokens_scored(scorer: Scorer, adapters: list[Adapter]) -> None:
    scorer.score([make_sample(adapters[1], i, length=20 + i) for i in range(3)], frozenset({"logp"}))
    stats = scorer.stats()
    assert stats["tokens"] == 63 and stats["seconds"] > 0
    assert 0 < stats["rss_bytes"] <= stats["peak_bytes"] * 1.01
