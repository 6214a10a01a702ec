"""The engines' parts against plain computations: prefix trees, packing, drawing, chunked logprobs, the dtype."""

import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from m2flow.worker.engines import _logprobs
from m2flow.worker.engines._causal_lm import CausalLM
from m2flow.worker.engines._logprobs import pair_logprobs
from m2flow.worker.engines._trie import TokenTrie
from m2flow.worker.engines.memory import keep_freed_pages
from m2flow.worker.engines.precision import generation_dtype
from m2flow.worker.engines.rollout import Prompt, SamplingParams
from m2flow.worker.engines.rollout._cache import PrefixCache
from m2flow.worker.engines.rollout._sampling import draw, keep_nucleus, uniforms
from m2flow.worker.engines.testing import save_tiny_model
from m2flow.worker.engines.trainer import Sample
from m2flow.worker.engines.trainer._packing import pack


def test_a_trie_has_one_node_per_distinct_prefix() -> None:
    trie = TokenTrie()
    paths = [trie.add(tokens) for tokens in ([5, 6, 7], [5, 6, 8], [9], [5, 6, 7])]
    assert [path.tolist() for path in paths] == [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2]]
    assert trie.tokens == [5, 6, 7, 8, 9]
    assert trie.depths == [0, 1, 2, 2, 0]
    assert trie.count_new([5, 6, 8]) == 0
    assert trie.count_new([5, 7, 8]) == 2


def test_some_nodes_see_what_they_see_among_all() -> None:
    draws = np.random.default_rng(1)
    trie = TokenTrie()
    for _ in range(40):
        trie.add(draws.integers(0, 3, draws.integers(1, 9)).tolist())
    nodes = np.flatnonzero(draws.random(len(trie)) < 0.5)
    assert np.array_equal(trie.visible(nodes.tolist()), trie.visible()[nodes])


def test_prefixes_that_are_known_are_not_computed_again(tmp_path: Path) -> None:
    lm = CausalLM.load(save_tiny_model(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    computed: list[int] = []
    hidden_of = lm.hidden_of
    lm.hidden_of = lambda trie, nodes, **kwargs: (computed.append(len(nodes)), hidden_of(trie, nodes, **kwargs))[1]
    shared, prefixes = list(range(20, 60)), PrefixCache(200)
    prompts = [[*shared, 1], [*shared, 2, 3], [*shared, 1, 4, 5]]
    with torch.inference_mode():
        _, first = prefixes.prefill(lm, prompts[:2])
        _, second = prefixes.prefill(lm, [prompts[2], prompts[0]])
        assert computed == [43, 3]  # 40 shared and 3; then 2 new, and the last token of one that is known
        torch.testing.assert_close(second[1], first[0], atol=1e-5, rtol=0)
        assert prefixes.count_new([*shared, 7]) == 1
        prefixes.prefill(lm, [list(range(60, 90)) * 6])
        assert prefixes.count_new([*shared, 7]) == 41  # it began anew where there was no room
        prefixes.clear()
        assert prefixes.num_bytes() == 0


def test_a_node_sees_its_prefix_and_nothing_else() -> None:
    draws = np.random.default_rng(0)
    trie = TokenTrie()
    paths = [trie.add(draws.integers(0, 3, draws.integers(1, 9)).tolist()) for _ in range(40)]
    visible = trie.visible()
    for path in paths:
        for depth, node in enumerate(path):
            assert np.flatnonzero(visible[node]).tolist() == sorted(path[: depth + 1].tolist())


def test_packing_keeps_order_limits_and_targets() -> None:
    draws = np.random.default_rng(1)
    samples = [
        Sample(draws.integers(0, 4, 5).tolist(), draws.integers(0, 4, draws.integers(1, 6)).tolist()) for _ in range(30)
    ]
    microbatches = list(pack(samples, 40))
    assert [number for batch in microbatches for number in batch.samples] == list(range(30))
    assert len(microbatches) > 1
    for batch in microbatches:
        assert len(batch.trie) <= 40
        assert len(set(zip(batch.pair_rows, batch.pair_tokens, strict=True))) == len(batch.pair_rows)
        for row, number in enumerate(batch.samples):
            sample = samples[number]
            length = len(sample.completion_ids)
            assert batch.valid[row].tolist() == [t < length for t in range(batch.valid.shape[1])]
            pairs = batch.pairs[row, :length]
            assert batch.pair_tokens[pairs].tolist() == list(sample.completion_ids)
            nodes = batch.rows[batch.pair_rows[pairs]]
            inputs = [*sample.prompt_ids, *sample.completion_ids]
            assert [batch.trie.tokens[node] for node in nodes] == inputs[len(sample.prompt_ids) - 1 : -1]


@pytest.mark.parametrize("chunk_logits", [1 << 24, 3 * 11, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_pair_logprobs_are_autograds(chunk_logits: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_logprobs, "_CHUNK_LOGITS", chunk_logits)
    generator = torch.Generator().manual_seed(0)
    rows, tokens = torch.tensor([0, 0, 1, 3, 3, 3, 6]), torch.tensor([1, 10, 2, 3, 0, 9, 5])
    weights = torch.randn(7, generator=generator)
    results = []
    for own in (True, False):
        torch.manual_seed(1)
        hidden, head = torch.randn(7, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
        if own:
            logprobs, entropy = pair_logprobs(hidden, head, rows, tokens, temperature=temperature)
        else:
            logs = torch.log_softmax(hidden @ head.T / temperature, dim=-1)
            logprobs, entropy = logs[rows, tokens], -(logs.exp() * logs).sum(-1)
        (logprobs * weights).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), hidden.grad, head.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_noise_is_uniform_and_its_own_at_every_place() -> None:
    seeds, indices = np.arange(50, dtype=np.uint64), np.arange(400, dtype=np.uint64)
    noise = uniforms(seeds, 3, indices)
    assert abs(noise.mean() - 0.5) < 0.01
    assert abs(noise.std() - 12**-0.5) < 0.01
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.2
    assert not np.any(noise == uniforms(seeds, 4, indices))
    assert np.array_equal(noise[7:8], uniforms(seeds[7:8], 3, indices))


def test_draws_follow_the_law_through_the_tail() -> None:
    # One token, and 300,000 so far below it that they are drawn through the tail, in which there is a quarter.
    logprobs = np.full(300_001, np.log(0.25 / 300_000), dtype=np.float32)
    logprobs[1000] = np.log(0.75)
    assert logprobs.max() - logprobs.min() > 12
    drawn = draw(logprobs, np.arange(1000, dtype=np.uint64), 0)
    assert abs(np.mean(drawn == 1000) - 0.75) < 0.06
    halves = np.bincount(drawn[drawn != 1000] // 150_001, minlength=2)
    assert halves.min() > 0.7 * halves.max()


def test_the_tail_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.worker.engines.rollout._sampling._WINDOW", 1.0)
    probabilities = np.array([0.05, 0.5, 0.05, 0.1, 0.3])
    drawn = draw(np.log(probabilities).astype(np.float32), np.arange(20_000, dtype=np.uint64), 2)
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 20_000, probabilities, atol=0.015)


def test_a_draw_is_its_seeds_alone() -> None:
    logprobs = np.log(np.random.default_rng(0).dirichlet(np.ones(50))).astype(np.float32)
    seeds = np.arange(200, dtype=np.uint64)
    together = draw(logprobs, seeds, 5)
    assert together.tolist() == [draw(logprobs, seeds[n : n + 1], 5)[0] for n in range(200)]
    # Rounding of the size that another batch brings changes no draw.
    assert np.array_equal(together, draw(logprobs + np.float32(1e-6), seeds, 5))


def test_the_nucleus_is_the_smallest_that_reaches_top_p() -> None:
    logprobs = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert torch.isfinite(keep_nucleus(logprobs, 0.65)).tolist() == [[False, True, False, True]]
    assert torch.isfinite(keep_nucleus(logprobs, 0.75)).tolist() == [[False, True, True, True]]
    assert torch.isfinite(keep_nucleus(logprobs, 0.1)).tolist() == [[False, True, False, False]]


def test_the_dtype_is_the_processors(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("gpu: the dtype is the GPU's here")
    cpuinfo = tmp_path / "cpuinfo"
    wanted = {"fma avx2": torch.float32, "avx2 avx512_bf16": torch.bfloat16, "amx_bf16": torch.bfloat16}
    for flags, want in wanted.items():
        cpuinfo.write_text(f"model name\t: any\nflags\t\t: {flags}\n")
        assert generation_dtype(cpuinfo) == want
    assert generation_dtype(tmp_path / "missing") == torch.float32


def test_freed_pages_are_kept_where_there_is_glibc() -> None:
    assert keep_freed_pages() == (platform.libc_ver()[0] == "glibc")


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        Prompt([], [1])
    with pytest.raises(ValueError, match="0 seeds"):
        Prompt([1], [])
    with pytest.raises(ValueError, match="max_new_tokens"):
        SamplingParams(0)
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(1, top_p=0)
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(1, temperature=-1)
    with pytest.raises(ValueError, match="at least 1 of each"):
        Sample([1], [])
    with pytest.raises(ValueError, match="one per token"):
        Sample([1], [2, 3], np.array([True]))
