"""Log-probabilities, entropies and the full KL: by hand, against torch's softmax, gradients, memory, compiling."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algos import _linear, _rows, kl, logprobs
from m2flow.algos.errors import DtypeError, SettingError, ShapeError

CASES = given(
    st.integers(1, 3), st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**31), st.sampled_from([0.5, 1.0, 2.0])
)
TRUE = torch.ones(1, 1, dtype=torch.bool)


@pytest.fixture(params=["one piece", "many pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with pieces larger than the input, and with pieces of a row or three columns."""
    if request.param == "many pieces":
        monkeypatch.setitem(_rows._PIECE, "cpu", 1)
        monkeypatch.setattr(_linear, "_SLICE", 1)
        monkeypatch.setattr(_linear, "_NARROWEST", 3)


def case(rows: int, steps: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits and others [B, T, V], tokens and mask [B, T]; float64."""
    g = torch.Generator().manual_seed(seed)
    logits, others = (3 * torch.randn(rows, steps, vocabulary, generator=g, dtype=torch.float64) for _ in range(2))
    tokens = torch.randint(vocabulary, (rows, steps), generator=g)
    return logits, others, tokens, torch.rand(rows, steps, generator=g) < 0.7


def plain(logits: Tensor, tokens: Tensor, mask: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropy by torch's softmax over the whole."""
    logp = (logits / temperature).log_softmax(-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)
    return logp.gather(-1, tokens[..., None])[..., 0] * mask, entropy * mask


@pytest.mark.usefixtures("_pieces")
def test_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3)]]])
    token = torch.tensor([[1]])
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert logprobs.from_logits(logits, token, TRUE).item() == pytest.approx(math.log(0.75))
    assert logprobs.entropy(logits, TRUE).item() == pytest.approx(entropy)
    hidden, weight = torch.ones(1, 1, 1), logits[0].T
    for got in (
        logprobs.from_logits_with_entropy(logits, token, TRUE),
        logprobs.from_hidden_with_entropy(hidden, weight, token, TRUE),
    ):
        assert [x.item() for x in got] == pytest.approx([math.log(0.75), entropy])
    assert logprobs.from_hidden(hidden, weight, token, TRUE).item() == pytest.approx(math.log(0.75))
    # At temperature 2 the odds 3 become their root.
    odds = math.sqrt(3)
    assert logprobs.from_logits(logits, token, TRUE, temperature=2.0).item() == pytest.approx(
        math.log(odds / (1 + odds))
    )


@pytest.mark.usefixtures("_pieces")
@CASES
def test_against_softmax(rows: int, steps: int, vocabulary: int, seed: int, temperature: float) -> None:
    logits, _, tokens, mask = case(rows, steps, vocabulary, seed)
    want = plain(logits, tokens, mask, temperature)
    got = logprobs.from_logits_with_entropy(logits, tokens, mask, temperature=temperature)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(logprobs.from_logits(logits, tokens, mask, temperature=temperature), want[0])
    torch.testing.assert_close(logprobs.entropy(logits, mask, temperature=temperature), want[1])


@pytest.mark.usefixtures("_pieces")
@CASES
def test_hidden_against_softmax(rows: int, steps: int, vocabulary: int, seed: int, temperature: float) -> None:
    hidden, weights, tokens, mask = case(rows, steps, 4, seed)
    weight = torch.randn(vocabulary, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens = tokens % vocabulary
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    want = plain(hidden @ weight.T, tokens, mask, temperature)
    got = logprobs.from_hidden_with_entropy(hidden, weight, tokens, mask, temperature=temperature)
    torch.testing.assert_close(got, want)
    scale = weights[..., 0], weights[..., 1]
    expected = torch.autograd.grad(sum((s * x).sum() for s, x in zip(scale, want, strict=True)), leaves)
    found = torch.autograd.grad(sum((s * x).sum() for s, x in zip(scale, got, strict=True)), leaves)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("_pieces")
@CASES
def test_full_kl_against_a_sum(rows: int, steps: int, vocabulary: int, seed: int, scale: float) -> None:
    p, q, _, mask = case(rows, steps, vocabulary, seed)
    p = p * scale
    want = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1) * mask
    got = kl.full(p, q, mask)
    torch.testing.assert_close(got, want)
    assert (got >= -1e-12).all()


@pytest.mark.usefixtures("_pieces")
def test_gradients_agree_with_differences() -> None:
    logits, others, tokens, mask = case(2, 3, 5, seed=1)
    logits.requires_grad_()
    others.requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda x: logprobs.from_logits(x, tokens, mask, temperature=0.7), logits)
    assert check(lambda x: logprobs.from_logits_with_entropy(x, tokens, mask, temperature=0.7), logits)
    assert check(lambda x: logprobs.entropy(x, mask), logits)
    assert check(lambda x, y: kl.full(x, y, mask), (logits, others))
    weight = others[0].detach().clone().requires_grad_()
    assert check(
        lambda x, w: logprobs.from_hidden_with_entropy(x, w, tokens % 3, mask, temperature=0.7), (logits, weight)
    )


def test_operators_keep_torchs_contract() -> None:
    logits, others, tokens, mask = case(2, 3, 5, seed=2)
    logits.requires_grad_()
    from m2flow.algos._linear import linear_logprobs_op
    from m2flow.algos._vocab import full_kl_op, token_logprobs_op

    torch.library.opcheck(token_logprobs_op, (logits, tokens, mask, 0.5, True))
    torch.library.opcheck(full_kl_op, (logits, others, mask))
    torch.library.opcheck(linear_logprobs_op, (logits, others[0], tokens % 3, mask, 0.5))


@pytest.mark.usefixtures("_pieces")
def test_what_lies_outside_the_mask_changes_nothing() -> None:
    logits, others, tokens, mask = case(3, 4, 6, seed=3)
    mask[1] = False
    outside = ~mask
    dirty, other_dirty = (x.masked_fill(outside[..., None], float("nan")).requires_grad_() for x in (logits, others))
    wild = tokens.masked_fill(outside, -100)
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    results = {
        "logits": logprobs.from_logits_with_entropy(dirty, wild, mask),
        "kl": (kl.full(dirty, other_dirty, mask),),
        "hidden": logprobs.from_hidden_with_entropy(dirty, weight, wild, mask),
    }
    torch.testing.assert_close(results["logits"], plain(logits, tokens, mask))
    torch.testing.assert_close(results["kl"][0], kl.full(logits, others, mask))
    for got in results.values():
        for x in got:
            assert x[outside].abs().sum() == 0
        grads = torch.autograd.grad(sum(x.sum() for x in got), [dirty, other_dirty, weight], allow_unused=True)
        for grad in grads[:2]:
            if grad is not None:
                assert torch.isfinite(grad).all()
                assert grad[outside].abs().sum() == 0
    assert torch.isfinite(grads[2]).all()


@pytest.mark.usefixtures("_pieces")
def test_impossible_tokens_add_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[[0.0, math.log(3), -math.inf]]], requires_grad=True)
    token = torch.tensor([[1]])
    got = logprobs.from_logits_with_entropy(logits, token, TRUE)
    torch.testing.assert_close(got, logprobs.from_logits_with_entropy(logits[..., :2], token, TRUE))
    (gradient,) = torch.autograd.grad((got[0] + 3 * got[1]).sum(), logits)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 0, 2] == 0
    assert logprobs.from_logits(logits, torch.tensor([[2]]), TRUE).item() == -math.inf
    both = torch.tensor([[[0.0, -math.inf]]], requires_grad=True)
    divergence = kl.full(both, torch.zeros(1, 1, 2), TRUE)
    assert divergence.item() == pytest.approx(math.log(2))
    assert torch.isfinite(torch.autograd.grad(divergence.sum(), both)[0]).all()


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_reduced_in_float32(dtype: torch.dtype) -> None:
    logits, others, tokens, mask = case(2, 3, 50, seed=4)
    logits, others = (x.to(dtype).requires_grad_() for x in (logits, others))
    wide, wide_others = (x.detach().float().requires_grad_() for x in (logits, others))
    pairs = [
        (
            logprobs.from_logits_with_entropy(logits, tokens, mask),
            logprobs.from_logits_with_entropy(wide, tokens, mask),
        ),
        ((kl.full(logits, others, mask),), (kl.full(wide, wide_others, mask),)),
    ]
    for got, want in pairs:
        for x, y in zip(got, want, strict=True):
            assert x.dtype is torch.float32
            torch.testing.assert_close(x, y, rtol=0, atol=0)
        (gradient,) = torch.autograd.grad(sum(x.sum() for x in got), logits)
        (expected,) = torch.autograd.grad(sum(x.sum() for x in want), wide)
        assert gradient.dtype is dtype
        torch.testing.assert_close(gradient, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.usefixtures("_pieces")
def test_logits_that_are_a_view_are_read_in_place() -> None:
    logits, _, tokens, mask = case(3, 5, 6, seed=5)
    for everywhere in (mask, torch.ones_like(mask)):
        view = logits[:, :-1]
        got = logprobs.from_logits(view, tokens[:, 1:], everywhere[:, 1:])
        torch.testing.assert_close(got, plain(view, tokens[:, 1:], everywhere[:, 1:])[0])


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_nothing_in_the_mask_gives_zeros(shape: tuple[int, int]) -> None:
    mask, tokens = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    logits = torch.zeros(*shape, 4, requires_grad=True)
    weight = torch.zeros(5, 4, requires_grad=True)
    got = (
        *logprobs.from_logits_with_entropy(logits, tokens, mask),
        *logprobs.from_hidden_with_entropy(logits, weight, tokens, mask),
        kl.full(logits, logits.detach(), mask),
    )
    for x in got:
        torch.testing.assert_close(x, torch.zeros(shape))
    for gradient in torch.autograd.grad(sum(x.sum() for x in got), [logits, weight]):
        assert gradient.abs().sum() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: no CUDA device")
def test_sixteen_bits_on_a_gpu_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 33, 1000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    tokens = torch.randint(1000, (2, 33), device="cuda")
    mask = torch.rand(2, 33, device="cuda") < 0.7
    got = logprobs.from_logits_with_entropy(logits, tokens, mask)
    monkeypatch.setitem(_rows._PIECE, "cuda", 5000)
    torch.testing.assert_close(logprobs.from_logits_with_entropy(logits, tokens, mask), got)
    logp = logits.float().log_softmax(-1)
    torch.testing.assert_close(got[0], logp.gather(-1, tokens[..., None])[..., 0] * mask, rtol=1e-4, atol=1e-4)


def test_errors_say_what_to_do() -> None:
    logits, tokens, mask = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3).bool()
    with pytest.raises(ShapeError, match=r"from_logits: logits has shape \[2, 3\], want \[B, T, V\]"):
        logprobs.from_logits(logits[..., 0], tokens, mask)
    with pytest.raises(ShapeError, match=r"from_logits: tokens has shape \[2, 2\], want \[2, 3\] like mask"):
        logprobs.from_logits(logits, tokens[:, 1:], mask)
    with pytest.raises(ShapeError, match=r"from_logits: mask has shape \[2, 2\], want \[2, 3\] like logits without"):
        logprobs.from_logits(logits, tokens, mask[:, 1:])
    with pytest.raises(DtypeError, match=r"from_logits: tokens has dtype torch.float32, want an integer dtype"):
        logprobs.from_logits(logits, tokens.float(), mask)
    with pytest.raises(DtypeError, match=r"from_logits: mask has dtype torch.int64, want torch.bool"):
        logprobs.from_logits(logits, tokens, mask.long())
    with pytest.raises(DtypeError, match=r"entropy: logits has dtype torch.int64, want a floating dtype"):
        logprobs.entropy(logits.long(), mask)
    with pytest.raises(SettingError, match=r"from_logits: temperature is 0.0, want more than 0.0"):
        logprobs.from_logits(logits, tokens, mask, temperature=0.0)
    with pytest.raises(ShapeError, match=r"from_hidden: weight has shape \[9, 5\], want \[V, 4\]: pass the head's"):
        logprobs.from_hidden(logits, torch.zeros(9, 5), tokens, mask)
    with pytest.raises(ShapeError, match=r"full: ref_logits has shape \[2, 3, 3\], want \[2, 3, 4\] like logits"):
        kl.full(logits, logits[..., 1:], mask)
    with pytest.raises(SettingError, match=r"a token is 9, want 0 to 3: leave positions that hold no token out"):
        logprobs.from_logits(logits, tokens + 9, mask)
    with pytest.raises(SettingError, match=r"a token is -100, want 0 to 4: leave positions that hold no token out"):
        logprobs.from_hidden(logits, torch.zeros(5, 4), tokens - 100, mask)
