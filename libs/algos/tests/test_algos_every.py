"""What holds for every public function: order of rows, padding, empty rows and batches, dtypes, errors, one graph.

Each function is called once in the table below, with operands of one batch by their names; a test then takes them all.
"""

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from m2flow import algos
from m2flow.algos.errors import DtypeError, KeywordError, ShapeError

Batch = dict[str, Tensor]
Settings = dict[str, object]

# The dimensions of each operand: B rows, T steps, S = T + 1, V vocabulary, H hidden size, K actions of D numbers,
# E critics.
DIMS: dict[str, str] = {
    word: dims
    for dims, words in {
        "BT": "logprobs old_logprobs ref_logprobs rollout_logprobs teacher_logprobs advantages rewards values returns "
        "old_values next_values x loss divergence mask terminated truncated tokens versions",
        "B": "score greedy group_ids turn_ids trajectory_ids lengths correct num_correct num_samples cut logprob ended",
        "BS": "bootstrapped",
        "BTV": "logits others",
        "BTH": "hidden",
        "VH": "weight",
        "BTK": "action_rewards action_mask",
        "BTKD": "action_logprobs",
        "BTD": "actions expert",
        "BD": "mean log_std noise",
        "EB": "q next_q",
        "": "alpha num_tokens num_sequences",
    }.items()
    for word in words.split()
}
POLICY = "logprobs old_logprobs advantages mask"
# Each function with its operands, and its settings; a setting that names an operand is that operand.
CALLS: dict[str, tuple[str, Settings]] = {
    "advantages.dr_grpo": ("score group_ids", {}),
    "advantages.gpg": ("score group_ids", {}),
    "advantages.grpo": ("score group_ids", {}),
    "advantages.grpo_trajectory": ("score group_ids trajectory_ids", {}),
    "advantages.grpo_turn": ("score group_ids turn_ids", {}),
    "advantages.opo": ("score group_ids lengths", {}),
    "advantages.reinforce_plus_plus": ("rewards mask", {"gamma": 0.9}),
    "advantages.reinforce_plus_plus_baseline": ("score group_ids mask", {}),
    "advantages.remax": ("score greedy", {}),
    "advantages.rloo": ("score group_ids", {}),
    "advantages.whiten": ("x mask", {}),
    "aggregation.fixed_length": ("loss mask", {"length": 9, "num_sequences": "num_sequences"}),
    "aggregation.sequence_mean_token_mean": ("loss mask", {"num_sequences": "num_sequences"}),
    "aggregation.sequence_mean_token_sum": ("loss mask", {"num_sequences": "num_sequences"}),
    "aggregation.token_mean": ("loss mask", {"num_tokens": "num_tokens"}),
    "chunks.spread": ("x", {"level": "action", "num_actions": 3, "num_tokens": 2}),
    "chunks.sum_logprobs": ("action_logprobs action_mask", {"level": "action"}),
    "chunks.sum_rewards": ("action_rewards action_mask", {"gamma": 0.9}),
    "cloning.l1": ("actions expert mask", {}),
    "cloning.mse": ("actions expert mask", {}),
    "cloning.nll": ("logprobs mask", {}),
    "corrections.icepop": ("old_logprobs rollout_logprobs mask", {"min_weight": 0.8, "max_weight": 1.2}),
    "corrections.mis": ("old_logprobs rollout_logprobs mask", {}),
    "corrections.staleness_decay": ("versions mask", {"policy_version": 5, "decay": 0.5}),
    "corrections.tis": ("old_logprobs rollout_logprobs mask", {"level": "geometric", "max_weight": 1.1}),
    "filters.best_of_n": ("score group_ids", {"num_best": 2}),
    "filters.drop_truncated": ("mask cut", {}),
    "filters.dynamic_sampling": ("correct group_ids", {}),
    "filters.zero_variance": ("score group_ids", {}),
    "kl.absolute": ("logprobs ref_logprobs mask", {}),
    "kl.full": ("logits others mask", {}),
    "kl.in_reward": ("rewards divergence mask", {"coef": 0.1}),
    "kl.k1": ("logprobs ref_logprobs mask", {}),
    "kl.k2": ("logprobs ref_logprobs mask", {}),
    "kl.k3": ("logprobs ref_logprobs mask", {}),
    "logprobs.entropy": ("logits mask", {"temperature": 0.7}),
    "logprobs.from_hidden": ("hidden weight tokens mask", {"temperature": 0.7}),
    "logprobs.from_hidden_with_entropy": ("hidden weight tokens mask", {}),
    "logprobs.from_logits": ("logits tokens mask", {"temperature": 0.7}),
    "logprobs.from_logits_with_entropy": ("logits tokens mask", {}),
    "losses.cispo": (POLICY, {}),
    "losses.decoupled_ppo": ("logprobs old_logprobs rollout_logprobs advantages mask", {"max_weight": 1.1}),
    "losses.distill_forward_kl": ("logits others mask", {}),
    "losses.distill_reverse_kl": ("logits others mask", {}),
    "losses.distill_sampled_kl": ("logprobs teacher_logprobs mask", {}),
    "losses.dual_clip": (POLICY, {"clip_max": 1.1}),
    "losses.gpg": ("logprobs advantages mask", {}),
    "losses.gspo": (POLICY, {"clip_low": 0.1, "clip_high": 0.1}),
    "losses.gspo_token": (POLICY, {"clip_low": 0.1, "clip_high": 0.1}),
    "losses.ppo_clip": (POLICY, {}),
    "losses.reinforce": ("logprobs advantages mask", {}),
    "losses.sapo": (POLICY, {}),
    "masks.from_lengths": ("lengths", {"num_tokens": 5}),
    "masks.place_last": ("score mask", {}),
    "masks.spread": ("score mask", {}),
    "metrics.explained_variance": ("values returns mask", {}),
    "metrics.pass_at_k": ("num_correct num_samples", {"k": 2}),
    "metrics.policy": (POLICY, {}),
    "metrics.rollout_correction": ("old_logprobs rollout_logprobs mask", {}),
    "returns.gae": (
        "rewards bootstrapped mask",
        {
            "gamma": 0.9,
            "lam": 0.8,
            "terminated": "terminated",
            "truncated": "truncated",
            "final_values": "next_values",
        },
    ),
    "returns.n_step": (
        "rewards next_values mask",
        {"num_steps": 3, "gamma": 0.9, "terminated": "terminated", "truncated": "truncated"},
    ),
    "returns.reward_to_go": ("rewards mask", {"gamma": 0.9, "terminated": "terminated"}),
    "sac.actor_loss": ("logprob q", {"temperature": "alpha"}),
    "sac.critic_loss": ("q score", {}),
    "sac.squash": ("mean log_std noise", {}),
    "sac.td_target": ("score next_q logprob ended", {"gamma": 0.9, "temperature": "alpha"}),
    "sac.temperature_loss": ("alpha logprob", {"target_entropy": -2.0}),
    "shaping.cosine": ("lengths correct", {"max_length": 6}),
    "shaping.group_length": ("lengths correct group_ids", {}),
    "shaping.overlong": ("lengths", {"max_length": 6, "buffer_length": 3}),
    "values.clipped": ("values old_values returns mask", {}),
    "values.huber": ("values returns mask", {"delta": 0.7}),
    "values.mse": ("values returns mask", {}),
}
# These draw by chance, change an object or read data; their own tests say what holds for them.
OTHERS = {"checks.check_finite", "rlpd.mixed_batch", "rlpd.subset", "targets.update"}
# A value is stopped on its way: a numeric derivative sees what autograd is told not to.
STOPPED = {"losses.gspo_token", "losses.cispo", "losses.distill_sampled_kl"}

EVERY = pytest.mark.parametrize("name", CALLS)
MASKED = pytest.mark.parametrize("name", [name for name, (words, _) in CALLS.items() if "mask" in words])


@pytest.fixture(scope="session")
def everything(batch: Callable[..., Batch]) -> Callable[..., Batch]:
    """Return a maker of batches that hold every operand, eight rows at most."""

    def make(rows: int, steps: int, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
        g = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

        def flags(*shape: int) -> Tensor:
            return torch.rand(shape, generator=g) < 0.6

        sizes = {"B": rows, "T": steps, "S": steps + 1, "V": 5, "H": 3, "K": 3, "D": 2, "E": 2}
        made = batch(rows, steps, seed, dtype)
        for word in (
            "alpha",
            "actions",
            "action_logprobs",
            "action_rewards",
            "bootstrapped",
            "expert",
            "greedy",
            "hidden",
        ):
            made[word] = noise(*(sizes[d] for d in DIMS[word]))
        for word in ("log_std", "logits", "logprob", "mean", "next_q", "noise", "others", "q", "score", "weight"):
            made[word] = noise(*(sizes[d] for d in DIMS[word]))
        for word in ("action_mask", "correct", "cut", "ended"):
            made[word] = flags(*(sizes[d] for d in DIMS[word]))
        made["alpha"] = made["alpha"].abs()
        made["tokens"] = torch.randint(5, (rows, steps), generator=g)
        made["versions"] = torch.randint(2, 8, (rows, steps), generator=g)
        made["lengths"] = torch.randint(8, (rows,), generator=g)
        made["num_samples"], made["num_correct"] = torch.full((rows,), 4), torch.randint(5, (rows,), generator=g)
        # Groups of four, three and one; trajectories of one or two turns.
        made["group_ids"] = torch.tensor([5, 5, 5, 5, 2, 2, 2, 9])[:rows]
        made["trajectory_ids"] = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5])[:rows]
        made["turn_ids"] = torch.tensor([0, 1, 0, 0, 0, 1, 0, 0])[:rows]
        made["num_tokens"], made["num_sequences"] = torch.tensor(17), torch.tensor(5)
        return made

    return make


def function_of(name: str) -> Callable[..., object]:
    """Return the function by its full name."""
    module, function = name.split(".")
    return getattr(getattr(algos, module), function)  # type: ignore[no-any-return]


def parameters(name: str) -> dict[str, str]:
    """Return which operand goes to which parameter of the function."""
    words, settings = CALLS[name]
    named = {k: v for k, v in settings.items() if isinstance(v, str) and v in DIMS}
    return {**dict(zip(inspect.signature(function_of(name)).parameters, words.split(), strict=False)), **named}


def caller(name: str) -> Callable[[Batch], list[Tensor]]:
    """Return what calls the function with a batch's operands and returns its results in a list."""
    function, (words, settings) = function_of(name), CALLS[name]

    def call(given: Batch) -> list[Tensor]:
        chosen = {k: given.get(v, v) if isinstance(v, str) else v for k, v in settings.items()}
        result = function(*[given[word] for word in words.split()], **chosen)
        if isinstance(result, dict):
            return list(result.values())
        return list(result) if isinstance(result, tuple) else [result]  # type: ignore[list-item]

    return call


def mask_of(name: str) -> str:
    """Return the name of the function's mask."""
    return "action_mask" if "action_mask" in CALLS[name][0] else "mask"


def with_gradients(call: Callable[[Batch], list[Tensor]], name: str, given: Batch) -> tuple[list[Tensor], Batch]:
    """Return the results, and the gradients of their (unevenly weighted) sum to those operands that get one."""
    leaves = {word: given[word].clone().requires_grad_() for word in parameters(name).values() if floats(given[word])}
    results = call({**given, **leaves})
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        if result.requires_grad:
            rows = torch.linspace(1.0, 2.0, result.shape[0]) if result.ndim else torch.ones(())
            total = total + (result * rows.reshape(-1, *[1] * (result.ndim - 1)).to(result)).sum()
    if not total.requires_grad:
        return results, {}
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    kept = {word: g for word, g in zip(leaves, gradients, strict=True) if g is not None}
    return [result.detach() for result in results], kept


def floats(x: Tensor) -> bool:
    """Return whether a gradient could flow to the operand."""
    return x.is_floating_point()


def take(given: Batch, rows: Tensor) -> Batch:
    """Return the batch with these rows, in this order."""
    return {k: x.index_select(DIMS[k].index("B"), rows) if "B" in DIMS.get(k, "") else x for k, x in given.items()}


def padded(given: Batch, left: int, right: int) -> Batch:
    """Return the batch with steps added outside the mask, which hold NaN, or a token that is none."""

    def wide(word: str, x: Tensor) -> Tensor:
        if not {"T", "S"} & set(DIMS.get(word, "")):
            return x
        fill = float("nan") if floats(x) else False if x.dtype is torch.bool else -100
        sides = [0, 0] * (x.ndim - 2) + [left, right]
        if "S" in DIMS[word]:
            return torch.cat([pad(x[:, :-1], sides, value=fill), x[:, -1:]], 1)
        return pad(x, sides, value=fill)

    return {word: wide(word, x) for word, x in given.items()}


def cells(given: Batch, mask: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each operand that has the mask's dimensions, and where it lies outside the mask."""
    for word, x in given.items():
        if DIMS.get(word, "").startswith(DIMS[mask]) and x.dtype is not torch.bool:
            yield word, ~given[mask].reshape(*given[mask].shape, *[1] * (x.ndim - given[mask].ndim)).expand_as(x)


def public() -> set[str]:
    """Return every public function's full name."""
    modules = {
        name: module for name, module in vars(algos).items() if name in algos.__all__ and inspect.ismodule(module)
    }
    return {
        f"{name}.{function}"
        for name, module in modules.items()
        for function, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__ and not function.startswith("_")
    }


def test_the_table_holds_every_public_function() -> None:
    assert public() == {*CALLS, *OTHERS}


def test_every_public_function_says_what_it_takes_and_where_it_is_from() -> None:
    for name in public():
        text = inspect.getdoc(function_of(name)) or ""
        for part in ("Args:", "Raises:", "Example:", "Source:"):
            assert part in text, f"{name} has no {part}"


@EVERY
def test_order_of_rows_does_not_matter(name: str, everything: Callable[..., Batch]) -> None:
    given, order = everything(8, 7, seed=1), torch.tensor([3, 7, 1, 4, 0, 2, 6, 5])
    results, gradients = with_gradients(caller(name), name, given)
    moved = caller(name)(take(given, order))
    for got, want in zip(moved, results, strict=True):
        torch.testing.assert_close(got, want[order] if want.ndim else want)
    assert all(torch.isfinite(x).all() for x in [*results, *gradients.values()])


@MASKED
@pytest.mark.parametrize(("left", "right"), [(0, 3), (2, 0), (1, 40)])
def test_padding_changes_nothing(name: str, left: int, right: int, everything: Callable[..., Batch]) -> None:
    given = everything(4, 7, seed=1)
    results, gradients = with_gradients(caller(name), name, given)
    wide, wide_gradients = with_gradients(caller(name), name, padded(given, left, right))
    pairs = list(zip(results, wide, strict=True))
    pairs += [(gradients[w], wide_gradients[w]) for w in gradients if w != "bootstrapped"]
    for narrow, got in pairs:
        if narrow.ndim < 2 or narrow.shape == got.shape:
            torch.testing.assert_close(got, narrow)
            continue
        each = narrow.shape[1] // 7
        torch.testing.assert_close(got[:, left * each : (left + 7) * each], narrow)
        assert not got[:, : left * each].any()
        assert not got[:, (left + 7) * each :].any()


@MASKED
def test_what_lies_outside_the_mask_changes_nothing(name: str, everything: Callable[..., Batch]) -> None:
    given = everything(4, 7, seed=2)
    dirty = dict(given)
    for word, outside in cells(given, mask_of(name)):
        dirty[word] = given[word].masked_fill(outside, float("nan") if floats(given[word]) else -100)
    # The values [B, T+1] have the mask's steps, and the bootstrap.
    now, after = given["bootstrapped"].split([7, 1], 1)
    dirty["bootstrapped"] = torch.cat([now.masked_fill(~given["mask"], float("nan")), after], 1)
    (results, gradients), (others, other_gradients) = (with_gradients(caller(name), name, x) for x in (given, dirty))
    torch.testing.assert_close(others, results)
    torch.testing.assert_close(other_gradients, gradients)
    for word, outside in cells(given, mask_of(name)):
        if word in gradients:
            assert not gradients[word][outside].any()
    for result in results:
        if result.shape == given["mask"].shape and mask_of(name) == "mask":
            assert not result[~given["mask"]].any()


@MASKED
def test_an_empty_row_is_zeros_and_as_if_it_were_not_there(name: str, everything: Callable[..., Batch]) -> None:
    given, others = everything(6, 7, seed=3), torch.tensor([0, 1, 3, 4, 5])
    given["group_ids"] = torch.tensor([5, 5, 9, 5, 2, 2])
    given[mask_of(name)][2] = False
    results = caller(name)(given)
    for got, want in zip(results, caller(name)(take(given, others)), strict=True):
        torch.testing.assert_close(got[others] if got.ndim else got, want)
        assert not got.ndim or not got[2].any()


@EVERY
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_in_the_mask_and_no_rows_are_zeros(
    name: str, shape: tuple[int, int], everything: Callable[..., Batch]
) -> None:
    given = everything(*shape, seed=4)
    for mask in ("mask", "action_mask"):
        given[mask] = torch.zeros_like(given[mask])
    results, gradients = with_gradients(caller(name), name, given)
    if "mask" in CALLS[name][0]:
        assert not any(x.any() for x in [*results, *gradients.values()])
    assert all(torch.isfinite(x).all() for x in results)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(name: str, dtype: torch.dtype, everything: Callable[..., Batch]) -> None:
    given = everything(3, 50, seed=5, dtype=dtype)
    results, gradients = with_gradients(caller(name), name, given)
    wide = {k: x.float() if floats(x) else x for k, x in given.items()}
    expected, wide_gradients = with_gradients(caller(name), name, wide)
    assert not {torch.bfloat16, torch.float16} & {x.dtype for x in results}
    # Products of hidden states are in the model's dtype, as the model's own head makes them.
    near = {"rtol": 2e-2, "atol": 2e-2} if "hidden" in name else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(results, expected, **near)
    torch.testing.assert_close(gradients, {w: g.to(given[w].dtype) for w, g in wide_gradients.items()}, **near)


@EVERY
def test_dtypes_may_be_mixed(name: str, everything: Callable[..., Batch]) -> None:
    """Where one operand is float32 and the others float64, results are near; or the error says what to cast."""
    given = everything(4, 40, seed=5)
    want = caller(name)(given)
    for word in parameters(name).values():
        if floats(given[word]) and "hidden" not in name:
            got = caller(name)({**given, word: given[word].float()})
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, check_dtype=False)


@EVERY
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_narrow_integers_do_not_wrap_round(name: str, dtype: torch.dtype, everything: Callable[..., Batch]) -> None:
    given = everything(8, 7, seed=5)
    narrow = {k: x.to(dtype) if x.dtype is torch.int64 else x for k, x in given.items()}
    torch.testing.assert_close(caller(name)(narrow), caller(name)(given))


@EVERY
def test_huge_gaps_stay_finite(name: str, everything: Callable[..., Batch]) -> None:
    given = everything(3, 5, seed=6, dtype=torch.float32)
    for word in ("old_logprobs", "ref_logprobs", "teacher_logprobs", "others"):
        given[word] = given[word] * 1000
    results, gradients = with_gradients(caller(name), name, given)
    assert all(torch.isfinite(x).all() for x in [*results, *gradients.values()])


@pytest.mark.parametrize("name", [name for name in CALLS if name not in STOPPED])
def test_gradient_agrees_with_differences(name: str, everything: Callable[..., Batch]) -> None:
    given = everything(3, 6, seed=7)
    _, gradients = with_gradients(caller(name), name, given)
    if gradients:
        leaves = [given[word].clone().requires_grad_() for word in gradients]
        assert torch.autograd.gradcheck(
            lambda *x: [y for y in caller(name)({**given, **dict(zip(gradients, x, strict=True))}) if floats(y)], leaves
        )


@EVERY
def test_compiles_to_one_graph(
    name: str, everything: Callable[..., Batch], compiled: Callable[..., Callable[..., list[Tensor]]]
) -> None:
    given = everything(3, 40, seed=8)
    results, gradients = with_gradients(caller(name), name, given)
    got, got_gradients = with_gradients(compiled(caller(name)), name, given)
    torch.testing.assert_close(got, results)
    torch.testing.assert_close(got_gradients, gradients)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: no CUDA device")
def test_a_gpu_gives_the_cpus_numbers_compiled_or_not(
    everything: Callable[..., Batch], compiled: Callable[..., Callable[..., list[Tensor]]]
) -> None:
    given = everything(8, 70, seed=1, dtype=torch.float32)
    moved = {word: x.cuda() for word, x in given.items()}
    for name in CALLS:
        want, gradients = with_gradients(caller(name), name, given)
        for call in (caller(name), compiled(caller(name))):
            got, got_gradients = with_gradients(call, name, moved)
            assert all(x.is_cuda for x in [*got, *got_gradients.values()])
            for ours, theirs in ((got, want), (list(got_gradients.values()), list(gradients.values()))):
                torch.testing.assert_close([x.cpu() for x in ours], theirs, rtol=1e-4, atol=1e-4, msg=name)


@EVERY
def test_a_gradient_flows_to_what_learns_alone(name: str, everything: Callable[..., Batch]) -> None:
    _, gradients = with_gradients(caller(name), name, everything(4, 7, seed=8))
    module, first = name.split(".")[0], CALLS[name][0].split()[0]
    if module in ("losses", "values", "cloning", "aggregation", "logprobs") or name == "sac.temperature_loss":
        assert set(gradients) == {first} | ({"weight"} if "hidden" in name else set())
    elif module in ("corrections", "filters", "metrics", "shaping") or name in ("kl.in_reward", "sac.td_target"):
        assert not gradients
    elif module == "advantages":
        assert set(gradients) == ({"x"} if name == "advantages.whiten" else set())


@EVERY
def test_wrong_operands_are_named(name: str, everything: Callable[..., Batch]) -> None:
    given, call, short = everything(4, 3, seed=9), caller(name), name.rsplit(".", 1)[1]
    for parameter, word in parameters(name).items():
        x, dims = given[word], DIMS[word]
        with pytest.raises(ShapeError, match=rf"^{short}: .*{parameter}.* has shape .*, want .*: \w"):
            call({**given, word: x[None]})
        if not dims:
            continue
        with pytest.raises(DtypeError, match=rf"^{short}: {parameter} is a list, want a torch.Tensor: use torch"):
            call({**given, word: x.tolist()})  # type: ignore[dict-item]
        other = x.double() if not floats(x) and x.dtype is not torch.bool else x.long()
        with pytest.raises(
            DtypeError, match=rf"^{short}: {parameter} has dtype {other.dtype}, want .*: use {parameter}\."
        ):
            call({**given, word: other})
        for dim in sorted({"B", "T", "S", "H"} & set(dims)):
            related = [w for w in parameters(name).values() if {dim, "T" if dim == "S" else dim} & set(DIMS[w])]
            if len(related) > 1:
                short_x = x.narrow(dims.index(dim), 0, x.shape[dims.index(dim)] - 1)
                with pytest.raises(ShapeError, match=rf"^{short}: .*, want .*: \w"):
                    call({**given, word: short_x})
    function = function_of(name)
    with pytest.raises(KeywordError, match=rf"^{short}: got the keyword lamda, want one of \w.*: \w"):
        function(*[given[word] for word in CALLS[name][0].split()], **CALLS[name][1], lamda=0.2)
