"""The credit actor's model: looks inside the policy that sampled a completion and answers per-token signals.

    Sample (version v) ──▶ adapted forward ─┬─▶ logp, entropy, DelTA features
                       ──▶ base forward ────┼─▶ logp_base, residual
                       ──▶ negative prompt ─┴─▶ logp_negative, kl_negative

Dimensions: R rows of a forward, T positions of a row, N policy tokens of a forward, H hidden size, C positions of a
chunk of the LM head, V vocabulary.
"""

import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.slots import AdapterSlots
from configs.schema import RunConfig
from credit.adapter import Adapter
from credit.trajectory import Sample, Signals

Key = tuple[int, int]
"""(group, index) of a sample."""

BASE = frozenset({"logp_base", "residual", "residual_noise"})
NEGATIVE = frozenset({"logp_negative", "kl_negative"})
SIGNALS = frozenset({"logp", "entropy", "delta_feature"}) | BASE | NEGATIVE

CHUNK_BYTES = 256 * 2**20  # logits of one application of the LM head
BLOCK_BYTES = 8 * 2**20  # rows of a chunk that go through log-softmax together: its temporaries stay this small
PADDING_PER_FORWARD = {"cpu": 128, "cuda": 1024}
"""Tokens of padding that cost about as much as one more forward: measured on a CPU; on a GPU an estimate, there it is
the launches of the kernels that cost."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of one forward, padded on the right, and where their policy tokens are."""

    tokens: Tensor  # [R, T] int64
    row: Tensor  # [N] int64, row of each policy token
    predictor: Tensor  # [N] int64, the position that predicts it
    target: Tensor  # [N] int64, the token itself

    @classmethod
    def stack(cls, sequences: list[tuple[np.ndarray, np.ndarray]], width: int, device: torch.device) -> "Rows":
        """Stack (tokens [T], mask [T]) pairs; `width` is at least the longest of them."""
        tokens = np.zeros((len(sequences), width), dtype=np.int64)
        mask = np.zeros((len(sequences), width), dtype=bool)
        for i, (row, row_mask) in enumerate(sequences):
            tokens[i, : len(row)], mask[i, : len(row)] = row, row_mask
        row, position = np.nonzero(mask)
        arrays = (tokens, row, position - 1, tokens[row, position])
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True, slots=True)
class Feature:
    """DelTA's v_t = (1 - pi(y_t)) h_t of one sample (2605.21467), as its two factors."""

    version: int
    mask: np.ndarray  # [T] bool
    surprise: Tensor  # [N] float32, 1 - pi(y_t)
    hidden: Tensor  # [N, H] in the model's dtype


class Scorer:
    """A frozen base model with several LoRA adapters resident."""

    def __init__(self, run: RunConfig, model_path: str) -> None:
        """Load the base model of `model_path`, on CUDA where there is one.

        Raises ValueError when credit.residual_layer does not exist, or when the logits are more than the LM head
        applied to the last hidden state (soft-capping, scaling).
        """
        self.credit = run.credit
        self.temperature = run.rollout.temperature
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=getattr(torch, run.model.dtype),
            attn_implementation="sdpa",
            trust_remote_code=run.model.trust_remote_code,
        )
        self.model.to(self.device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType]
        self.inner: Any = self.model.get_decoder()
        self.slots = AdapterSlots(self.model, run.adapter_slots)
        self.vocabulary, self.hidden_size = self.head.weight.shape
        logit_bytes = 4 if self.model.dtype == torch.float32 else 4 + self.model.dtype.itemsize
        self.chunk = max(1, CHUNK_BYTES // (self.vocabulary * logit_bytes))  # positions
        self.block = max(1, BLOCK_BYTES // (self.vocabulary * 4))  # positions
        self.features: dict[tuple[str, int, int], Feature] = {}  # by policy, group, index
        self.tokens_scored = 0
        self.seconds = 0.0
        self.captured: Tensor | None = None  # [R, T, H] output of the residual's layer in the last forward
        self._hook_residual_layer()
        self._check_head()

    def load(self, adapter: Adapter) -> np.ndarray:
        """Make `adapter` resident and answer its canary: [T] float32 log-probs, 0 at position 0.

        Raises ValueError when the adapter is damaged or was made for another base model, RuntimeError when no slot is
        free or the version is resident with other content.
        """
        highest = max(adapter.canary.tokens)
        if highest >= self.vocabulary:
            raise ValueError(
                f"adapter v{adapter.version}: its canary has token {highest}, expected less than the base model's "
                f"vocabulary of {self.vocabulary}: it was trained on another base model"
            )
        self.slots.load(adapter)
        return self.canary(adapter.canary.tokens, adapter.version, adapter.policy)

    def unload(self, version: int, policy: str = "") -> None:
        """Free the version's slot and forget the DelTA features of its samples: too old to be trained.

        Raises RuntimeError if it is not resident.
        """
        self.slots.unload(version, policy)
        gone = [key for key, feature in self.features.items() if (key[0], feature.version) == (policy, version)]
        for key in gone:
            del self.features[key]

    def forget(self, policy: str) -> None:
        """Unload all versions of a policy."""
        for version in [version for owner, version in self.slots.resident if owner == policy]:
            self.unload(version, policy)

    @torch.inference_mode()
    def canary(self, tokens: list[int], version: int | None, policy: str = "") -> np.ndarray:
        """[T] float32 log-probs of `tokens` at temperature 1 under a version (None: the base), 0 at position 0."""
        self.slots.activate(version, policy)
        mask = np.arange(len(tokens)) > 0
        rows = Rows.stack([(np.array(tokens), mask)], len(tokens), self.device)
        logp, _ = self._token_statistics(self._forward(rows)[0], rows.target, temperature=1.0)
        return np.concatenate([np.zeros(1, np.float32), logp.cpu().numpy()])

    @torch.inference_mode()
    def score(
        self, samples: list[Sample], needs: frozenset[str], negatives: dict[int, list[int]] | None = None
    ) -> list[Signals]:
        """Signals of every sample under its own version, in the order of `samples`: name -> [T] float32.

        `needs` names signals of `SIGNALS`; `logp` is always answered. Log-probs are those of the sampling distribution
        at rollout.temperature. `delta_feature` is kept here, for `delta_sums` and `delta_dots`. `negatives` maps each
        group to the tokens of its negative prompt. Raises RuntimeError for a version that is not resident,
        FloatingPointError for logits that are not finite, ValueError for an unknown signal or no negative prompt.
        """
        started = time.perf_counter()
        if unknown := needs - SIGNALS:
            raise ValueError(f"credit signals: got {sorted(unknown)}, expected some of {sorted(SIGNALS)}")
        if self.credit.noise_floor and "residual" in needs:
            needs = needs | {"residual_noise"}
        negated = [self._negated(sample, negatives or {}) for sample in samples] if needs & NEGATIVE else None
        widths = [len(sample.tokens) for sample in samples]
        if negated:
            widths = [max(width, len(tokens)) for width, (tokens, _) in zip(widths, negated, strict=True)]
        signals: list[Signals] = [{} for _ in samples]
        for batch in self._batches(samples, widths):
            rows = [samples[i] for i in batch]
            scored = self._signals(rows, needs, [negated[i] for i in batch] if negated else None)
            for i, values in zip(batch, scored, strict=True):
                signals[i] = values
        self.tokens_scored += sum(len(sample.tokens) for sample in samples)
        self.seconds += time.perf_counter() - started
        return signals

    def delta_sums(self, coefficients: dict[Key, np.ndarray], policy: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Sums of |c_t| v_t over tokens with c_t > 0 and over those with c_t < 0, each [H] float32.

        `coefficients` maps (group, index) of the policy's samples to [T] float32. Summed in float64 in the order of
        the keys. Raises RuntimeError for a sample without features.
        """
        sums_2H = torch.zeros(2, self.hidden_size, dtype=torch.float64)
        for key in sorted(coefficients):
            feature = self._feature(key, policy)
            c_N = torch.from_numpy(np.array(coefficients[key])[feature.mask]).double() * feature.surprise
            sums_2H += torch.stack([c_N.clamp(min=0), (-c_N).clamp(min=0)]) @ feature.hidden.double()
        return sums_2H[0].float().numpy(), sums_2H[1].float().numpy()

    def delta_dots(self, direction: np.ndarray, keys: list[Key], policy: str = "") -> dict[Key, np.ndarray]:
        """v_t . direction ([H]) of the samples `keys`: (group, index) -> [T] float32, 0 where the mask is False.

        Raises RuntimeError for a sample without features.
        """
        direction_H = torch.from_numpy(np.array(direction)).double()
        dots: dict[Key, np.ndarray] = {}
        for key in keys:
            feature = self._feature(key, policy)
            dots[key] = np.zeros(len(feature.mask), dtype=np.float32)
            dots[key][feature.mask] = ((feature.hidden.double() @ direction_H) * feature.surprise).float().numpy()
        return dots

    def delta_clear(self, keys: list[Key], policy: str = "") -> None:
        """Forget the DelTA features of the samples `keys`; those of an unloaded version are gone already."""
        for key in keys:
            self.features.pop((policy, *key), None)

    def stats(self, policy: str = "") -> dict[str, Any]:
        """Resident versions of the policy, work done so far and memory in bytes."""
        with open("/proc/self/statm") as statm:
            rss = int(statm.read().split()[1]) * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "resident": sorted(version for owner, version in self.slots.resident if owner == policy),
            "tokens": self.tokens_scored,
            "seconds": self.seconds,
            "rss_bytes": rss,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else peak,
        }

    def _signals(
        self, samples: list[Sample], needs: frozenset[str], negated: list[tuple[np.ndarray, np.ndarray]] | None
    ) -> list[Signals]:
        """`score` for one micro-batch of one version; `negated` are its tokens and masks after the negative prompt."""
        sequences = [(sample.tokens, sample.mask) for sample in samples]
        rows = Rows.stack(sequences, max(len(tokens) for tokens, _ in sequences), self.device)
        self.slots.activate(samples[0].version, samples[0].policy)
        hidden_NH, state_NH = self._forward(rows)
        logp, entropy = self._token_statistics(hidden_NH, rows.target, entropy="entropy" in needs)
        values = {"logp": logp}
        if entropy is not None:
            values["entropy"] = entropy
        if negated:
            other = Rows.stack(negated, max(len(tokens) for tokens, _ in negated), self.device)
            negative_NH, _ = self._forward(other)
            if "logp_negative" in needs:
                values["logp_negative"], _ = self._token_statistics(negative_NH, other.target)
            if "kl_negative" in needs:
                values["kl_negative"] = self._divergence(hidden_NH, negative_NH)
        if needs & BASE:
            self.slots.activate(None)
            base_NH, base_state_NH = self._forward(rows)
            if "logp_base" in needs:
                values["logp_base"], _ = self._token_statistics(base_NH, rows.target)
            if "residual" in needs:
                values["residual"] = self._distance(state_NH, base_state_NH)
            if "residual_noise" in needs:
                # one sequence at a time and one column wider: another batch shape even for a single row
                alone = [Rows.stack([sequence], len(sequence[0]) + 1, self.device) for sequence in sequences]
                repeated_NH = torch.cat([self._forward(row)[1] for row in alone])
                values["residual_noise"] = self._distance(repeated_NH, base_state_NH)
        signals = _scatter(samples, values)
        if "delta_feature" in needs:
            self._keep_features(samples, hidden_NH, logp)
        return signals

    @property
    def head(self) -> Any:
        """The LM head as it is now: PEFT replaces it when LoRA targets it."""
        return self.model.get_output_embeddings()

    def _forward(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Input of the LM head and the state that the residual compares, [N, H] each, at the predicting positions.

        No attention mask: under causal attention no real token sees the padding on its right, and sdpa takes its
        causal kernel. Rows of similar length, not packs: without flash-attention, transformers gives sdpa a
        block-diagonal mask over the whole pack, so attention costs the square of the pack. Measured on a CPU, packing
        took 7 x (0.6M parameters) and 2.4 x (42M) the time for 128 rows of 16 to 40 tokens, 3.0 x and 1.5 x for 8 of
        100 to 500; it only won for 8 short rows (0.93 x and 0.77 x).
        """
        hidden_RTH = self.inner(input_ids=rows.tokens, use_cache=False).last_hidden_state
        hidden_NH = hidden_RTH[rows.row, rows.predictor]
        if self.captured is None:
            return hidden_NH, hidden_NH
        state_NH, self.captured = self.captured[rows.row, rows.predictor], None
        return hidden_NH, self.inner.norm(state_NH) if self.credit.residual_norm == "post" else state_NH

    def _logits(self, hidden_CH: Tensor, temperature: float) -> Tensor:
        """[C, V] float32, of the processed distribution."""
        logits = self.head(hidden_CH).float()
        return logits if temperature == 1.0 else logits.div_(temperature)

    def _token_statistics(
        self, hidden_NH: Tensor, target_N: Tensor, *, entropy: bool = False, temperature: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob of each target and, if asked for, the entropy of its whole distribution: [N] float32."""
        # results are written in place: a small tensor kept from every block splits the space that the block's large
        # ones leave, malloc finds none for the next, and the heap grows to the size of the full logits
        logp_N, entropy_N = torch.zeros(2, len(target_N), device=self.device)
        for chunk in _spans(len(target_N), self.chunk):
            logits_CV = self._logits(hidden_NH[chunk], self.temperature if temperature is None else temperature)
            logp_C, entropy_C, target_C1 = logp_N[chunk], entropy_N[chunk], target_N[chunk, None]
            for block in _spans(len(logits_CV), self.block):
                log_probs = logits_CV[block].log_softmax(-1)
                logp_C[block] = log_probs.gather(1, target_C1[block])[:, 0]
                if entropy:
                    entropy_C[block] = -(log_probs.exp() * log_probs).sum(-1)
            del logits_CV  # or two chunks live at once
        return logp_N, entropy_N if entropy else None

    def _divergence(self, hidden_NH: Tensor, other_NH: Tensor) -> Tensor:
        """KL of the distributions after `hidden_NH` to those after `other_NH`, over the whole vocabulary: [N]."""
        kl_N = torch.zeros(len(hidden_NH), device=self.device)
        for chunk in _spans(len(hidden_NH), max(1, self.chunk // 2)):
            p_CV = self._logits(hidden_NH[chunk], self.temperature)
            q_CV = self._logits(other_NH[chunk], self.temperature)
            kl_C = kl_N[chunk]
            for block in _spans(len(p_CV), self.block):
                log_p = p_CV[block].log_softmax(-1)
                kl_C[block] = (log_p.exp() * (log_p - q_CV[block].log_softmax(-1))).sum(-1)
            del p_CV, q_CV
        return kl_N.clamp_(min=0)

    def _distance(self, state_NH: Tensor, base_NH: Tensor) -> Tensor:
        """||state - base||_2, over ||base||_2 if credit.residual_relative (2606.00257 eq. 15): [N] float32."""
        base = base_NH.float()
        distance = (state_NH.float() - base).norm(dim=-1)
        return distance / base.norm(dim=-1) if self.credit.residual_relative else distance

    def _feature(self, key: Key, policy: str) -> Feature:
        if (policy, *key) not in self.features:
            raise RuntimeError(f"sample {key[0]}/{key[1]}: no DelTA feature is kept: score it with 'delta_feature'")
        return self.features[policy, *key]

    def _keep_features(self, samples: list[Sample], hidden_NH: Tensor, logp_N: Tensor) -> None:
        counts = [int(sample.mask.sum()) for sample in samples]
        surprise_N = -torch.expm1(logp_N).cpu()
        for sample, surprise, hidden in zip(
            samples, surprise_N.split(counts), hidden_NH.cpu().split(counts), strict=True
        ):
            key = sample.policy, sample.group, sample.index
            self.features[key] = Feature(sample.version, sample.mask.copy(), surprise, hidden)

    def _negated(self, sample: Sample, negatives: dict[int, list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """The sample's tokens and mask, with the negative prompt in place of all before the first policy token."""
        if not negatives.get(sample.group):
            raise ValueError(
                f"sample {sample.group}/{sample.index}: no negative prompt for group {sample.group}: render one "
                "(credit.negative) and pass it in `negatives`"
            )
        prompt = np.array(negatives[sample.group], dtype=np.int64)
        first = int(np.argmax(sample.mask))
        mask = np.concatenate([np.zeros(len(prompt), dtype=bool), sample.mask[first:]])
        return np.concatenate([prompt, sample.tokens[first:]]), mask

    def _batches(self, samples: list[Sample], widths: list[int]) -> list[list[int]]:
        """Indices of `samples` for one forward each: one version, similar widths, within credit.tokens_per_forward.

        In an order of the samples' own, so that results do not depend on the order of arrival.
        """
        for sample in samples:
            digest = self.slots.digest(sample.version, sample.policy)
            if digest != sample.digest:
                raise RuntimeError(
                    f"sample {sample.group}/{sample.index}: sampled under another v{sample.version} than the resident "
                    f"one, got digest {sample.digest[:12]}, expected {digest[:12]}"
                )
        keys = [(s.policy, s.version, width, s.group, s.index) for s, width in zip(samples, widths, strict=True)]
        batches: list[list[int]] = []
        padding = 0
        for i in sorted(range(len(samples)), key=keys.__getitem__):
            batch = batches[-1] if batches else []
            if batch:
                padding += len(batch) * (widths[i] - widths[batch[-1]])
            fits = (
                batch
                and samples[batch[-1]].version == samples[i].version
                and samples[batch[-1]].policy == samples[i].policy
                and (len(batch) + 1) * widths[i] <= self.credit.tokens_per_forward
                and padding <= PADDING_PER_FORWARD[self.device.type]
            )
            if fits:
                batch.append(i)
            else:
                batches.append([i])
                padding = 0
        return batches

    def _hook_residual_layer(self) -> None:
        layer, num_layers = self.credit.residual_layer, self.model.config.num_hidden_layers
        if not -num_layers <= layer < num_layers:
            raise ValueError(
                f"credit.residual_layer: got {layer}, expected {-num_layers} to {num_layers - 1}: the model has "
                f"{num_layers} layers"
            )
        if self.credit.residual_norm == "post" and layer in (-1, num_layers - 1):
            return  # the input of the LM head, at hand in every forward

        def capture(module: nn.Module, inputs: Any, output: Any) -> None:
            self.captured = output[0] if isinstance(output, tuple) else output

        self.inner.layers[layer].register_forward_hook(capture)

    @torch.inference_mode()
    def _check_head(self) -> None:
        tokens = torch.arange(min(8, self.vocabulary), device=self.device)[None]
        expected = self.model(input_ids=tokens, use_cache=False).logits
        actual = self.head(self.inner(input_ids=tokens, use_cache=False).last_hidden_state)
        if not torch.allclose(actual.float(), expected.float(), rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"model.path: the logits of {type(self.model).__name__} are not its LM head applied to the last hidden "
                "state (soft-capping or scaling): such models cannot be scored"
            )


def _spans(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _scatter(samples: list[Sample], values: dict[str, Tensor]) -> list[Signals]:
    """Cut each [N] signal into one [T] array per sample. Raises FloatingPointError where one is not finite."""
    borders = np.cumsum([int(sample.mask.sum()) for sample in samples])[:-1]
    parts = {name: np.split(value.cpu().numpy(), borders) for name, value in values.items()}
    signals: list[Signals] = []
    for i, sample in enumerate(samples):
        signals.append({name: np.zeros(len(sample.tokens), dtype=np.float32) for name in parts})
        for name, part in parts.items():
            if not np.isfinite(part[i]).all():
                raise FloatingPointError(
                    f"sample {sample.group}/{sample.index}: {name} is not finite: the logits of v{sample.version}, or "
                    "of the base model, hold NaN or infinity"
                )
            signals[i][name][sample.mask] = part[i]
    return signals
