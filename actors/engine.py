"""vLLM's engine behind the few synchronous calls that the rollout worker needs; the only file that touches `vllm`.

The environment is set before vLLM is imported, so import this module late and only in the process that samples.

Log-probs are those of the distribution that was sampled from (vLLM's `processed_logprobs`): logits divided by the
temperature, then cut to `top_p` and renormalised. A scorer that wants to agree divides its logits by the same
temperature; with `top_p < 1` it cannot agree. Greedy requests (temperature 0) report log-probs at temperature 1.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from configs.schema import RunConfig
from credit.adapter import Adapter
from credit.trajectory import Prompt, Sample

ON_GPU = torch.cuda.is_available()

# The engine runs in this process: its adapters are swapped between two of our own calls to step().
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if not ON_GPU:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else the first sampled token waits 10 s for a compiler
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # replicas share cores
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only; it would override kv_cache_memory_bytes

from vllm import SamplingParams  # noqa: E402
from vllm.config.lora import MaxLoRARanks  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.exceptions import VLLMError  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA  # noqa: E402
from vllm.lora.peft_helper import PEFTHelper  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from actors import kernels  # noqa: E402

CPU_BATCHED_TOKENS = 8192
"""Tokens of one engine step at the most, where whole prompts are prefilled."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is done."""

    request: str
    tokens: list[int]  # [C] the completion, EOS or the stop string's tokens included
    logprobs: np.ndarray  # [C] float32, of the sampled tokens
    prompt_logprobs: np.ndarray | None  # [P] float32, 0 at position 0; only of requests added with `score`
    text: str  # without special tokens, and without the stop string unless it is for an environment
    finish: str  # "stop" or "length"
    cached_tokens: int  # of the prompt, taken from the prefix cache

    def sample(self, prompt: Prompt, index: int, version: int, digest: str) -> Sample:
        """As completion `index` of `prompt`, under the version that sampled it."""
        zeros = np.zeros(len(prompt.tokens), np.float32)
        return Sample(
            group=prompt.group,
            index=index,
            tokens=np.array([*prompt.tokens, *self.tokens], np.int64),
            mask=np.arange(len(prompt.tokens) + len(self.tokens)) >= len(prompt.tokens),
            logprobs=np.concatenate([zeros, self.logprobs]),
            text=self.text,
            finish=self.finish,
            version=version,
            digest=digest,
            policy=prompt.policy,
        )


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Callers may live in processes that do not import vLLM, and could not unpickle its exceptions."""
    try:
        yield
    except VLLMError as error:
        raise ValueError(f"rollout: vLLM refuses the request: {error}") from error


class Engine:
    """Not thread-safe: construct it and call it from one thread."""

    def __init__(self, run: RunConfig, model_path: str) -> None:
        self._run = run
        self._adapters: dict[int, LoRARequest] = {}
        self._arrivals = 0
        self._newest = 0  # adapter id
        self.begun: set[str] = set()  # requests added with `announce` that got a token in the last step
        preload = os.environ.get("LD_PRELOAD")
        if not ON_GPU:
            kernels.install()
        self._llm = LLMEngine.from_engine_args(_engine_args(run, model_path))
        # vLLM sets it for worker processes, which it does not start here; other children must not inherit it
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload
        self._tokenizer = self._llm.get_tokenizer()

    @_plain_errors()
    def add(
        self,
        request: str,
        tokens: list[int],
        *,
        seed: int,
        adapter: int,
        temperature: float,
        max_tokens: int | None = None,
        announce: bool = False,
    ) -> None:
        """Queue one completion of `tokens` [P] under a loaded adapter. Requests start in the order of these calls.

        `max_tokens`: rollout.max_new_tokens unless given. `announce`: tell of its tokens in `begun` before it is
        finished.
        """
        rollout = self._run.rollout
        params = SamplingParams(
            temperature=temperature,
            top_p=rollout.top_p,
            seed=seed,
            max_tokens=max_tokens or rollout.max_new_tokens,
            stop=rollout.stop,
            include_stop_str_in_output=self._run.environment is not None,  # it is part of what an environment is told
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,
            # token by token it costs as much as a small model's forward pass; only stop strings need it
            detokenize=bool(rollout.stop),
            output_kind=RequestOutputKind.CUMULATIVE if announce else RequestOutputKind.FINAL_ONLY,
        )
        self._add(request, tokens, params, self._adapters[adapter], priority=0)

    @_plain_errors()
    def score(self, request: str, tokens: list[int], adapter: int | None) -> None:
        """Ask for the log-probs of `tokens` [P] under an adapter, or under the base model. Goes before all others."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_reading_prefix_cache=True,  # the answer has to come from a forward pass
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._add(request, tokens, params, None if adapter is None else self._adapters[adapter], priority=-1)

    def _add(
        self, request: str, tokens: list[int], params: SamplingParams, lora: LoRARequest | None, priority: int
    ) -> None:
        # requests of one priority run in order of arrival: a counter orders them, where clock ticks may be equal
        self._arrivals += 1
        self._llm.add_request(
            request,
            {"prompt_token_ids": tokens},
            params,
            arrival_time=float(self._arrivals),
            lora_request=lora,
            priority=priority,
        )

    def step(self) -> list[Finished]:
        """One forward pass over the running batch; the requests that it completed."""
        outputs = [output for output in self._llm.step() if isinstance(output, RequestOutput)]
        self.begun = {output.request_id for output in outputs}
        return [self._finished(output) for output in outputs if output.finished]

    def _finished(self, output: RequestOutput) -> Finished:
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        text = completion.text
        if not self._run.rollout.stop:
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        prompt_logprobs = None
        if output.prompt_logprobs is not None:
            # position 0 has no prediction
            prompt_logprobs = np.array([0.0, *_values(output.prompt_logprobs)], np.float32)
        return Finished(
            request=output.request_id,
            tokens=tokens,
            logprobs=np.array(_values(completion.logprobs), np.float32),
            prompt_logprobs=prompt_logprobs,
            text=text,
            finish=str(completion.finish_reason),
            cached_tokens=output.num_cached_tokens or 0,
        )

    @_plain_errors()
    def load(self, number: int, name: str, adapter: Adapter) -> None:
        """Put an adapter into a free slot, from memory to memory. `number` is its id in vLLM.

        Ids only go up, and a name is used once: the prefix cache tells versions apart by them. Raises RuntimeError for
        an id that may have been used.
        """
        if number <= self._newest or any(name == lora.lora_name for lora in self._adapters.values()):
            raise RuntimeError(
                f"rollout: adapter id {number} ({name}): got an id that may have been used before, expected more than "
                f"{self._newest}: the prefix cache would answer for another version"
            )
        self._newest = number
        self._llm.collective_rpc(partial(_put, number=number, config=adapter.config, tensors=adapter.tensors))
        # vLLM reads the path for an adapter that it does not hold: there is none, so a lost adapter is an error
        self._adapters[number] = LoRARequest(lora_name=name, lora_int_id=number, lora_path=f"/in-memory/{name}")

    def prove(self, number: int, adapter: Adapter) -> None:
        """Read an adapter back from the memory that forward passes use. Raises RuntimeError where it differs.

        Bit for bit, in the slots' dtype: A as in `adapter`, B times alpha / r of the run's config, 0 elsewhere. Each
        worker of a tensor-parallel engine holds a part of every tensor, and fused experts are laid out otherwise: there
        nothing is compared.
        """
        if self._run.rollout.tensor_parallel > 1:
            return
        (slot,) = self._llm.collective_rpc(partial(_slot, adapter=number))
        if slot is None:
            return
        tensors = adapter.tensors
        if lost := sorted(tensors.keys() - slot.keys()):
            raise RuntimeError(f"rollout: adapter {adapter}: {lost[0]} has no place in vLLM's slots: it is not served")
        lora = self._run.lora_of(adapter.policy)
        scaling = lora.alpha / lora.r
        wrong = [name for name, held in slot.items() if not _holds(held, tensors.get(name), "lora_B" in name, scaling)]
        if wrong:
            raise RuntimeError(
                f"rollout: adapter {adapter}: {len(wrong)} of {len(slot)} tensors in vLLM's slot are not the "
                f"adapter's, the first is {wrong[0]}: got other bytes, rank or scaling than the run's config gives"
            )

    def unload(self, adapter: int) -> None:
        del self._adapters[adapter]
        self._llm.remove_lora(adapter)

    def loaded(self) -> set[int]:
        """Adapter ids that vLLM itself says are loaded."""
        return set(self._llm.list_loras())

    def abort(self, requests: list[str]) -> None:
        self._llm.abort_request(requests)

    def close(self) -> None:
        self._llm.engine_core.shutdown()


def _put(worker: Any, number: int, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Register and activate an adapter as vLLM's `add_lora` does, but for the file. Runs in vLLM's worker.

    Through a file, safetensors would leave two small objects behind for each tensor of each version.
    """
    manager = worker.model_runner.lora_manager
    helper = PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    model = manager._lora_model_cls.from_lora_tensors(
        number,
        {name: torch.tensor(tensor) for name, tensor in tensors.items()},  # copies: the store's pages are not held
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager._adapter_manager.add_adapter(model)
    manager._adapter_manager.activate_adapter(number)


def _slot(worker: Any, adapter: int) -> dict[str, torch.Tensor] | None:
    """The padded tensors of the slot that an adapter is in, under PEFT's names. Runs in vLLM's worker.

    None where a module does not hold one pair of matrices for each of its parts.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    if adapter not in manager.lora_index_to_id:
        raise RuntimeError(f"rollout: adapter id {adapter}: in no slot of vLLM's: it is not served")
    index = manager.lora_index_to_id.index(adapter)
    tensors = {}
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if not isinstance(module, BaseLinearLayerWithLoRA) or len(parts) != len(module.lora_a_stacked):
            return None
        for i, part in enumerate(parts):
            tensors[f"base_model.model.{part}.lora_A.weight"] = module.lora_a_stacked[i][index, 0]
            tensors[f"base_model.model.{part}.lora_B.weight"] = module.lora_b_stacked[i][index, 0]
    return tensors


def _holds(held: torch.Tensor, tensor: np.ndarray | None, scaled: bool, scaling: float) -> bool:
    """Whether `held` is `tensor` and zeros."""
    if tensor is None:
        return not held.any()
    rows, columns = tensor.shape
    expected = torch.tensor(tensor, dtype=held.dtype, device=held.device)
    part = held[:rows, :columns]
    same = torch.equal(part, expected * scaling if scaled else expected)
    return same and not held[rows:].any() and not held[:, columns:].any()


def _values(logprobs: object) -> list[float]:
    assert isinstance(logprobs, FlatLogprobs)  # as asked for with flat_logprobs
    return logprobs.logprobs


def _engine_args(run: RunConfig, model_path: str) -> EngineArgs:
    rollout = run.rollout
    if not ON_GPU and rollout.tensor_parallel > 1:
        raise ValueError(f"rollout.tensor_parallel: got {rollout.tensor_parallel} without a GPU, expected 1")
    return EngineArgs(
        model=model_path,
        dtype=run.model.dtype,
        max_model_len=run.model.max_length,
        trust_remote_code=run.model.trust_remote_code,
        seed=run.seed,
        max_num_seqs=rollout.max_num_seqs,
        # a prompt that is prefilled in pieces rewinds its request's random generator, which CPU generators cannot do
        enable_chunked_prefill=None if ON_GPU else False,
        max_num_batched_tokens=None if ON_GPU else max(run.model.max_length, CPU_BATCHED_TOKENS),
        enable_prefix_caching=True,
        enable_lora=True,
        max_loras=run.adapter_slots,
        max_cpu_loras=run.adapter_slots,
        max_lora_rank=_supported_rank(run.lora.r),
        # by default vLLM also prepares the LM head, at a cost per token, and then miscounts rows where prompt log-probs
        # are asked for in a mixed batch
        lora_target_modules=_targets(run, model_path),
        logprobs_mode="processed_logprobs",
        scheduling_policy="priority",
        enforce_eager=rollout.enforce_eager or not ON_GPU,
        tensor_parallel_size=rollout.tensor_parallel,
        distributed_executor_backend="uni" if rollout.tensor_parallel == 1 else None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_memory_bytes=None if ON_GPU else int(rollout.kv_cache_gb * 2**30),
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )


def _supported_rank(rank: int) -> MaxLoRARanks:
    """vLLM's slots come in a few ranks; a smaller adapter fits into a larger one."""
    for supported in get_args(MaxLoRARanks):
        if rank <= supported:
            return supported
    raise ValueError(f"lora.r: got {rank}, expected at most {get_args(MaxLoRARanks)[-1]}, the largest that vLLM serves")


def _targets(run: RunConfig, model_path: str) -> list[str]:
    """The last names of the modules that carry LoRA; `all-linear` as PEFT reads it: linear layers but the LM head."""
    if run.lora.targets != "all-linear":
        return sorted({name.rsplit(".", 1)[-1] for name in run.lora.targets})
    trust = run.model.trust_remote_code
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sorted({name.rsplit(".", 1)[-1] for name in linear})
