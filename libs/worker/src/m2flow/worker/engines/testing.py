"""What anyone who writes an engine can test it with: a tiny model, and a suite of checks per Protocol.

Inherit a suite in a pytest class and give it `make_engine`; its oracles are plain transformers calls.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from m2flow.worker.engines.rollout.engine import Completion, Prompt, RolloutEngine, SamplingParams
from m2flow.worker.engines.trainer.engine import LossInputs, Metrics, Sample, TrainerEngine, train_minibatch
from m2flow.worker.testing.conformance import refused

VOCABULARY = 97


def save_tiny_model(path: Path, *, seed: int = 0) -> Path:
    """Write a random two-layer Llama (grouped heads, tied projection, 97 tokens) to `path`; returns `path`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def reference_logprobs(
    path: Path, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Logprob of each completion token by one plain forward pass over the sequence, float32 [T]."""
    logs = _reference_distributions(path, [*prompt, *completion], temperature)[len(prompt) - 1 : -1]
    chosen: NDArray[np.float32] = logs[np.arange(len(completion)), np.array(completion)]
    return chosen


def _reference_distributions(path: Path, tokens: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
    """Logprobs of every next token after each prefix of `tokens`, float32 [T, V]."""
    with torch.no_grad():
        logits = _reference_model(path)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        logs: NDArray[np.float32] = torch.log_softmax(logits / temperature, dim=-1).numpy()
    return logs


def _reference_weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in _reference_model(path).named_parameters()}


@functools.lru_cache(maxsize=4)
def _reference_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(False)


def _by_index(groups: Iterable[tuple[int, list[Completion]]]) -> list[list[Completion]]:
    found = dict(groups)
    assert sorted(found) == list(range(len(found))), "each prompt once"
    return [found[index] for index in range(len(found))]


def _prompts(num_prompts: int, num_samples: int) -> list[Prompt]:
    """Prompts of different lengths that share their first tokens."""
    draws = np.random.default_rng(3)
    shared = draws.integers(3, VOCABULARY, 5).tolist()
    return [
        Prompt(
            [*shared, *draws.integers(3, VOCABULARY, 1 + index % 4).tolist()],
            draws.integers(0, 2**63, num_samples).tolist(),
        )
        for index in range(num_prompts)
    ]


class RolloutEngineSuite:
    """Checks of a float32 `RolloutEngine`."""

    def make_engine(self, path: Path) -> RolloutEngine:
        """An engine over the model directory `path`."""
        raise AssertionError("inherit, and build the engine here")

    def test_generate_returns_a_completion_per_seed(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        stops = tuple(range(10))
        groups = _by_index(engine.generate(_prompts(4, 6), SamplingParams(12, stop_token_ids=stops)))
        assert [len(group) for group in groups] == [6] * 4
        for completion in (completion for group in groups for completion in group):
            tokens = completion.token_ids.tolist()
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert len(tokens) == len(completion.logprobs) <= 12
            assert not set(tokens[:-1]) & set(stops)
            assert completion.finish_reason == ("stop" if tokens[-1] in stops else "length")
            assert completion.finish_reason == "stop" or len(tokens) == 12

    def test_generate_reports_the_policys_logprobs(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        prompts = _prompts(3, 4)
        groups = _by_index(engine.generate(prompts, SamplingParams(70, temperature=0.7)))
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                want = reference_logprobs(tmp_path, prompt.token_ids, completion.token_ids.tolist(), 0.7)
                np.testing.assert_allclose(completion.logprobs, want, atol=2e-5)

    def test_generate_is_independent_of_the_batch(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        prompts, params = _prompts(5, 4), SamplingParams(8)
        together = _by_index(engine.generate(prompts, params))
        backwards = _by_index(engine.generate(prompts[::-1], params))[::-1]
        alone = [
            [next(iter(engine.generate([Prompt(prompt.token_ids, [seed])], params)))[1][0] for seed in prompt.seeds]
            for prompt in prompts
        ]
        for others in (backwards, alone):
            for group, other in zip(together, others, strict=True):
                for one, two in zip(group, other, strict=True):
                    assert one.token_ids.tolist() == two.token_ids.tolist()
                    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)

    def test_generate_takes_more_while_it_works(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        prompts, params = _prompts(7, 3), SamplingParams(6, stop_token_ids=tuple(range(8)))
        together = _by_index(engine.generate(prompts, params))
        # One comes every time that it is asked, one at a time in the middle of others; then it is left to end.
        coming = [[], [prompts[2]], prompts[3:5], [], [], [], [], [], [], [prompts[5]], [], [], [], [prompts[6]]]

        def more(room: int) -> Sequence[Prompt]:
            assert room > 0
            return coming.pop(0) if coming else []

        came = {}
        for index, group in engine.generate(prompts[:2], params, more=more):
            came[index] = group
        while coming:  # an idle engine ends, and is asked again
            start = 7 - sum(map(len, coming))
            came |= {start + index: group for index, group in engine.generate([], params, more=more)}
        assert sorted(came) == list(range(7))
        for index, group in enumerate(together):
            for one, two in zip(group, came[index], strict=True):
                assert one.token_ids.tolist() == two.token_ids.tolist()
                np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)

    def test_generate_goes_on_from_what_it_generated(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        params = SamplingParams(5)
        tokens = [5, 6, 7]
        for turn in range(4):
            ((_, (completion,)),) = engine.generate([Prompt(tokens, [turn])], params)
            want = reference_logprobs(tmp_path, tokens, completion.token_ids.tolist())
            np.testing.assert_allclose(completion.logprobs, want, atol=2e-5)
            tokens = [*tokens, *completion.token_ids.tolist(), 8 + turn]

    def test_generate_samples_the_policy(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        num_samples = 4000
        prompt = Prompt([5, 6, 7], list(range(num_samples)))
        ((_, group),) = engine.generate([prompt], SamplingParams(1))
        counts = np.bincount([completion.token_ids[0] for completion in group], minlength=VOCABULARY)
        want = np.exp(_reference_distributions(tmp_path, [5, 6, 7])[-1])
        deviations = (counts - num_samples * want) / np.sqrt(num_samples * want * (1 - want) + 1e-9)
        # Five standard deviations for the worst of 97 tokens, and a few counts for the rarest.
        assert np.all((np.abs(deviations) < 5) | (np.abs(counts - num_samples * want) < 4))

    def test_generate_greedily_takes_the_likeliest(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        ((_, group),) = engine.generate([Prompt([5, 6, 7], [1, 2])], SamplingParams(6, temperature=0))
        tokens = [5, 6, 7]
        for _ in range(6):
            tokens.append(int(_reference_distributions(tmp_path, tokens)[-1].argmax()))
        assert [completion.token_ids.tolist() for completion in group] == [tokens[3:]] * 2

    def test_generate_with_top_p_stays_in_the_nucleus(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        ((_, group),) = engine.generate([Prompt([5, 6, 7], list(range(300)))], SamplingParams(1, top_p=0.4))
        logs = _reference_distributions(tmp_path, [5, 6, 7])[-1]
        order = np.argsort(-logs)
        size = int(np.searchsorted(np.cumsum(np.exp(logs[order])), 0.4)) + 1
        assert {int(completion.token_ids[0]) for completion in group} <= set(order[:size].tolist())

    def test_load_weights_replaces_the_policy(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path / "a"))
        engine.load_weights(_reference_weights(save_tiny_model(tmp_path / "b", seed=1)), 7)
        assert engine.policy_version == 7
        ((_, (completion,)),) = engine.generate([Prompt([5, 6, 7], [1])], SamplingParams(6))
        want = reference_logprobs(tmp_path / "b", [5, 6, 7], completion.token_ids.tolist())
        np.testing.assert_allclose(completion.logprobs, want, atol=2e-5)

    def test_weights_change_in_the_middle_of_a_generation(self, tmp_path: Path) -> None:
        """Drawn tokens stay; each has the logprob of the weights that it was drawn with, given all before it."""
        paths = [save_tiny_model(tmp_path / "a"), save_tiny_model(tmp_path / "b", seed=1), tmp_path / "a"]
        engine = self.make_engine(paths[0])
        loaded = {4: 1, 7: 2}  # after so many steps comes this version
        steps = 0

        def safe_point() -> None:
            nonlocal steps
            steps += 1
            if steps in loaded:
                engine.load_weights(_reference_weights(paths[loaded[steps]]), loaded[steps])

        prompts = _prompts(5, 3)
        groups = _by_index(engine.generate(prompts, SamplingParams(9), safe_point=safe_point))
        for completion in groups[0]:  # what begins first has drawn a token a step
            assert completion.token_versions.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                tokens, versions = completion.token_ids.tolist(), completion.token_versions
                assert versions.dtype == np.int32
                assert versions.tolist() == sorted(versions.tolist())
                want = np.array([reference_logprobs(path, prompt.token_ids, tokens) for path in paths])
                np.testing.assert_allclose(completion.logprobs, want[versions, np.arange(len(tokens))], atol=2e-5)

    def test_load_weights_refuses_another_model(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        weights: dict[str, Tensor] = {name: tensor.detach() for name, tensor in model.named_parameters()}
        name = next(iter(weights))
        refused(ValueError, "stranger", lambda: engine.load_weights({**weights, "stranger": weights[name]}, 1))
        refused(ValueError, name, lambda: engine.load_weights({**weights, name: weights[name][:-1]}, 1))
        del weights[name]
        refused(ValueError, name, lambda: engine.load_weights(weights, 1))
        assert engine.policy_version == 0


class TrainerEngineSuite:
    """Checks of a float32 `TrainerEngine` with AdamW, betas 0.9 and 0.95, eps 1e-8, no decay, clipping at 1."""

    lr = 1e-3

    def make_engine(self, path: Path, *, microbatch_tokens: int = 4096) -> TrainerEngine:
        """An engine over the model directory `path`, of learning rate `lr`, temperature 1."""
        raise AssertionError("inherit, and build the engine here")

    def test_logprobs_are_a_plain_forwards(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        samples = _samples()
        for sample, got in zip(samples, engine.logprobs(samples), strict=True):
            want = reference_logprobs(tmp_path, sample.prompt_ids, sample.completion_ids)
            np.testing.assert_allclose(got, want, atol=2e-5)

    def test_a_step_is_torchs(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        samples = _samples()
        for _ in range(3):
            got = train_minibatch(engine, samples, _weighted_loss, weight=float(len(samples)))
            loss = torch.tensor(0.0)
            for number, sample in enumerate(samples):
                tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
                logs = torch.log_softmax(model(input_ids=tokens).logits[0], dim=-1)
                length = len(sample.prompt_ids)
                chosen = logs[length - 1 : -1].gather(1, tokens[0, length:, None])[:, 0]
                mask = torch.ones(len(chosen)) if sample.loss_mask is None else torch.tensor(sample.loss_mask)
                loss = loss - _WEIGHTS[number] * (chosen * mask).sum() / len(samples)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert math.isclose(got["grad_norm"], float(norm), rel_tol=1e-4)
            assert math.isclose(got["loss"], float(loss.detach()), rel_tol=1e-4, abs_tol=1e-5)
        for name, tensor in engine.named_weights().items():
            # A gradient of rounding size may take AdamW's full first step in either direction: compare the bulk.
            difference = (tensor - dict(model.named_parameters())[name].detach()).abs()
            assert float(difference.median()) < 1e-6, name
            assert float(difference.mean()) < 0.01 * self.lr, name

    def test_microbatches_change_nothing(self, tmp_path: Path) -> None:
        save_tiny_model(tmp_path)
        moments = []
        for microbatch_tokens in (4096, 24, 1):
            engine = self.make_engine(tmp_path, microbatch_tokens=microbatch_tokens)
            metrics = train_minibatch(engine, _samples(), _weighted_loss, weight=5.0)
            state = engine.state_dict()
            flat = torch.cat([state[name].flatten() for name in sorted(state) if name.startswith("first.")])
            moments.append((flat, metrics["loss"]))
        for flat, loss in moments[1:]:
            assert float((flat - moments[0][0]).abs().max()) < 1e-6
            assert abs(loss - moments[0][1]) < 1e-6

    def test_gradients_add_up(self, tmp_path: Path) -> None:
        save_tiny_model(tmp_path)
        whole, parts = self.make_engine(tmp_path), self.make_engine(tmp_path)
        samples = _samples()
        whole.accumulate(samples, _sum_loss)
        parts.accumulate(samples[:2], _sum_loss)
        parts.accumulate(samples[2:], _sum_loss)
        assert math.isclose(whole.step(3.0)["grad_norm"], parts.step(3.0)["grad_norm"], rel_tol=1e-5)

    def test_a_step_without_gradient_changes_nothing(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path))
        before = {name: tensor.clone() for name, tensor in engine.named_weights().items()}
        assert engine.step(1.0)["grad_norm"] == 0
        assert all(torch.equal(before[name], tensor) for name, tensor in engine.named_weights().items())
        refused(ValueError, "weight", lambda: engine.step(0.0))

    def test_state_restores_the_run_to_the_bit(self, tmp_path: Path) -> None:
        save_tiny_model(tmp_path)
        one, two = self.make_engine(tmp_path), self.make_engine(tmp_path)
        train_minibatch(one, _samples(), _sum_loss, weight=5.0)
        two.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()})
        for engine in (one, two):
            train_minibatch(engine, _samples(), _sum_loss, weight=5.0)
        left, right = one.state_dict(), two.state_dict()
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
        refused(ValueError, "names or shapes", lambda: two.load_state_dict({}))

    def test_save_pretrained_is_loaded_by_transformers(self, tmp_path: Path) -> None:
        engine = self.make_engine(save_tiny_model(tmp_path / "start"))
        train_minibatch(engine, _samples(), _sum_loss, weight=5.0)
        engine.save_pretrained(tmp_path / "end")
        sample = _samples()[0]
        want = reference_logprobs(tmp_path / "end", sample.prompt_ids, sample.completion_ids)
        np.testing.assert_allclose(engine.logprobs([sample])[0], want, atol=2e-5)


_WEIGHTS = (1.0, -0.5, 0.25, 2.0, -1.0)


def _samples() -> list[Sample]:
    """Five samples that share prompts and beginnings, one with tokens that are not the policy's."""
    mask = np.array([True, False, True])
    return [
        Sample([5, 6, 7, 8], [10, 11, 12]),
        Sample([5, 6, 7, 8], [10, 11, 13, 14]),
        Sample([5, 6, 9], [10]),
        Sample([5, 6, 9], [20, 21, 22], mask),
        Sample([5, 6, 7, 8], [10, 11, 12]),
    ]


def _sum_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    return -(inputs.logprobs * inputs.mask).sum(), {}


def _weighted_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    weights = torch.tensor([_WEIGHTS[number] for number in inputs.samples])[:, None]
    loss = -(weights * inputs.logprobs * inputs.mask).sum()
    return loss, {"loss": float(loss.detach())}
