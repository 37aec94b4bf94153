from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from actors.engine import Engine, Finished, _supported_rank, _targets
from tests.actors.policy import Policy, run_config

STOPS = [f"{digit}4" for digit in range(10)]


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return Policy(tiny_model)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, policy: Policy) -> Iterator[Engine]:
    """Adapters 1 and 2 are loaded; the slots are three."""
    engine = Engine(run_config(max_new_tokens=40, stop=STOPS, max_num_seqs=64), str(tiny_model))
    for number in (1, 2):
        engine.load(number, f"v{number}", policy.adapter(number))
    yield engine
    engine.close()


def complete(engine: Engine) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    while engine._llm.has_unfinished_requests():
        done.update((finished.request, finished) for finished in engine.step())
    return done


def difference(finished: Finished, expected: np.ndarray) -> float:
    return float(np.abs(finished.logprobs - expected[-len(finished.tokens) :]).max())


def assert_scored(finished: Finished, expected: np.ndarray) -> None:
    assert finished.prompt_logprobs is not None
    np.testing.assert_allclose(finished.prompt_logprobs, expected, atol=1e-4)


def test_adapters_mixed_in_a_batch_with_the_base_model_each_give_their_own_logprobs(engine, policy):
    prompts = {str(i): list(range(4 + i, 20 + 2 * i)) for i in range(12)}
    for i, (request, tokens) in enumerate(prompts.items()):
        engine.add(request, tokens, seed=i, adapter=1 + i % 2, temperature=1.0)
    engine.step()
    engine.score("base", prompts["3"], None)
    engine.score("adapted", prompts["3"], 2)
    done = complete(engine)
    for i, (request, tokens) in enumerate(prompts.items()):
        finished = done[request]
        own, other = (policy.logprobs(policy.adapter(n), tokens + finished.tokens) for n in (1 + i % 2, 2 - i % 2))
        assert difference(finished, own) < 1e-4
        assert difference(finished, other) > 1e-2
    assert_scored(done["base"], policy.logprobs(None, prompts["3"]))
    assert_scored(done["adapted"], policy.logprobs(policy.adapter(2), prompts["3"]))


def test_logprobs_are_those_of_the_distribution_at_the_sampling_temperature(engine, policy):
    tokens = list(range(10, 30))
    for i in range(8):
        engine.add(str(i), tokens, seed=i, adapter=1, temperature=0.6)
    for finished in complete(engine).values():
        sequence = tokens + finished.tokens
        assert difference(finished, policy.logprobs(policy.adapter(1), sequence, temperature=0.6)) < 1e-4
        assert difference(finished, policy.logprobs(policy.adapter(1), sequence)) > 1e-2


def test_greedy_takes_the_likeliest_token_and_reports_its_logprob_at_temperature_one(engine, policy):
    tokens = list(range(10, 30))
    for i in range(2):
        engine.add(str(i), tokens, seed=i, adapter=1, temperature=0.0)
    engine.add("random", tokens, seed=5, adapter=1, temperature=1.0)
    done = complete(engine)
    assert done["0"].tokens == done["1"].tokens != done["random"].tokens
    expected = policy.logprobs(policy.adapter(1), tokens + done["0"].tokens)
    assert difference(done["0"], expected) < 1e-4
    # the likeliest first token: no other one has a higher log-prob
    others = [policy.logprobs(policy.adapter(1), [*tokens, token])[-1] for token in range(99)]
    assert np.argmax(others) == done["0"].tokens[0]


def test_a_stop_string_ends_the_completion_and_its_tokens_are_kept(engine, policy):
    tokens = list(range(10, 30))
    for i in range(200):
        engine.add(str(i), tokens, seed=1000 + i, adapter=1, temperature=2.0)
    decode = engine._tokenizer.decode
    stopped = 0
    for finished in complete(engine).values():
        whole = decode(finished.tokens, skip_special_tokens=True)
        assert len(finished.logprobs) == len(finished.tokens)
        assert not any(stop in finished.text for stop in STOPS)
        if whole[-2:] in STOPS:
            stopped += 1
            assert (finished.finish, finished.text) == ("stop", whole[:-2])
            assert difference(finished, policy.logprobs(policy.adapter(1), tokens + finished.tokens, 2.0)) < 1e-4
    assert stopped > 0


def test_a_score_is_never_answered_from_the_prefix_cache(engine, policy):
    tokens = (list(range(4, 90)) * 4)[:300]  # more than two blocks of the cache
    for request in ("first", "second"):
        engine.add(request, tokens, seed=0, adapter=1, temperature=1.0)
        cached = complete(engine)[request].cached_tokens
        assert cached == (0 if request == "first" else 256)
    engine.score("canary", tokens, 1)
    finished = complete(engine)["canary"]
    assert finished.cached_tokens == 0
    assert_scored(finished, policy.logprobs(policy.adapter(1), tokens))


def test_vllm_lists_the_adapters_that_are_loaded(engine, policy):
    engine.load(3, "v3", policy.adapter(3))
    assert engine.loaded() == {1, 2, 3}
    engine.unload(3)
    assert engine.loaded() == {1, 2}


def test_a_rank_is_rounded_up_to_one_that_vllm_serves():
    assert [_supported_rank(rank) for rank in (1, 2, 8, 12, 16, 33)] == [1, 8, 8, 16, 16, 64]
    with pytest.raises(ValueError, match=r"lora.r: got 600, expected at most 512"):
        _supported_rank(600)


def test_all_linear_leaves_out_the_lm_head(tiny_model):
    run = run_config()
    linear = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert _targets(run, str(tiny_model)) == linear
    some = run.model_copy(update={"lora": run.lora.model_copy(update={"targets": ["self_attn.q_proj", "v_proj"]})})
    assert _targets(some, str(tiny_model)) == ["q_proj", "v_proj"]


def test_tensor_parallel_without_a_gpu_is_refused(tiny_model):
    with pytest.raises(ValueError, match=r"rollout.tensor_parallel: got 2 without a GPU, expected 1"):
        Engine(run_config(tensor_parallel=2), str(tiny_model))
