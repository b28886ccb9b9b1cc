"""The tokens' log-probabilities and entropies, and the gradients of both."""

from __future__ import annotations

import math

import pytest
import torch
from inputs import IGNORED, TRAINABLE, Inputs, gradients_of, make_inputs, make_options, make_trained_inputs
from plans import forced_plan
from tolerance import assert_gradients, assert_log_probs
from torch.utils._python_dispatch import TorchDispatchMode

from cce_dist import VocabParallelLMHead, linear_cross_entropy, linear_log_probs, reference
from cce_dist.kernels.config import PASS

NAMES = [(), ("logit_scale",), ("softcap",), ("logit_scale", "softcap")]
TINY = (20, 16, 330)
SEAMS = {"panel": 256, "wide": 0, "rows": 16, "kept": 256}
by_names = pytest.mark.parametrize("names", NAMES, ids=lambda names: "-".join(names) or "plain")


def call(inputs: Inputs, **options):
    return linear_log_probs(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias, **options)


def spoil_ignored(inputs: Inputs, value: float = math.nan) -> Inputs:
    with torch.no_grad():
        inputs.hidden[inputs.targets == IGNORED] = value
    return inputs


def normal(inputs: Inputs, seed: int) -> torch.Tensor:
    return torch.randn(inputs.targets.shape, generator=torch.Generator().manual_seed(seed)).to(inputs.hidden.device)


def assert_both_right(inputs: Inputs, upstream, *, yardstick="operands", **options) -> None:
    """Values and gradients for an ``upstream`` gradient of each."""
    results = call(inputs, return_entropy=True, **options)
    assert_log_probs(*(x.detach() for x in results), inputs, **options)
    gradients = gradients_of(results, inputs, options, upstream)
    assert_gradients(gradients, inputs, upstream, yardstick=yardstick, function=reference.log_probs, **options)
    assert (gradients[0][inputs.targets == options.get("ignore_index", IGNORED)] == 0).all()


def check_both(device, dtype, names, size, make=make_inputs):
    inputs = spoil_ignored(make(*size, dtype, device=device, bias=True, ignored=0.3))
    options = make_options(names, inputs)
    zeros = torch.zeros_like(normal(inputs, 1))
    # sums of fp16 do not wait for blocks of tokens
    with forced_plan(**{name: x for name, x in SEAMS.items() if name != "rows" or dtype != torch.float16}):
        # each alone, the second expanded; and both, of their own
        for index, upstream in enumerate((
            [normal(inputs, 1), zeros],
            [zeros, zeros[:1].add(-0.7).expand_as(zeros)],
            [normal(inputs, 1), normal(inputs, 2)],
        )):  # fmt: skip
            # no entry of an entropy's gradient stands out, to be added in fp32
            yardstick = "output" if index == 0 and make is make_trained_inputs else "operands"
            assert_both_right(inputs, upstream, yardstick=yardstick, **options)


@by_names
def test_log_probs_and_entropies(run, request, names) -> None:
    if "interpreter" in request.node.name and len(names) == 1 and not request.config.getoption("--slow"):
        pytest.skip("slow: needs --slow")
    run(check_both, torch.float32, names, TINY)


@by_names
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype, names) -> None:
    check_both(torch.device("cpu"), dtype, names, TINY)


@by_names
def test_bf16(run, request, names) -> None:
    if "interpreter" in request.node.name:
        pytest.skip("Triton 3.9's interpreter gets products of transposed bf16 tiles wrong")
    run(check_both, torch.bfloat16, names, (200, 64, 700), make_trained_inputs)


@pytest.mark.parametrize("v", [2, 63, 65, 255, 256, 257, 513])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"softcap": 1.0, "logit_scale": 4.0}], ids=str)
def test_phantom_columns(v, options) -> None:
    inputs = make_inputs(5, 8, v, spread=0.01, bias=-8.0, seed=v)
    assert_both_right(inputs, [normal(inputs, 1), normal(inputs, 2)], **options)


@pytest.mark.parametrize("budget", [None, "min", 1 << 22])
def test_budgets(budget) -> None:
    inputs = make_inputs(*TINY, bias=True, ignored=0.3)
    results = call(inputs, return_entropy=True, memory_budget=budget)
    assert_log_probs(*(x.detach() for x in results), inputs)
    upstream = [normal(inputs, 1), normal(inputs, 2)]
    assert_gradients(gradients_of(results, inputs, {}, upstream), inputs, upstream, function=reference.log_probs)


def test_only_log_probs_are_asked_for() -> None:
    inputs = spoil_ignored(make_inputs(*TINY, bias=True, ignored=0.3))
    options = make_options(NAMES[-1], inputs)
    alone, (both, _) = call(inputs, **options), call(inputs, return_entropy=True, **options)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, both)
    assert_log_probs(alone.detach(), None, inputs, **options)
    upstream = normal(inputs, 1)
    gradients = gradients_of(alone, inputs, options, upstream)
    assert_gradients(
        gradients, inputs, [upstream, torch.zeros_like(upstream)], function=reference.log_probs, **options
    )


def test_only_one_of_both_is_used() -> None:
    # what is not used has no gradient at all, not one of zero
    inputs = make_inputs(*TINY, bias=True, ignored=0.3)
    zeros = torch.zeros(20)
    for index in range(2):
        upstream = [normal(inputs, 1) if i == index else zeros for i in range(2)]
        used = call(inputs, return_entropy=True)[index]
        gradients = gradients_of(used, inputs, {}, upstream[index])
        assert_gradients(gradients, inputs, upstream, function=reference.log_probs)


@by_names
def test_finite_differences(names) -> None:
    inputs = make_inputs(6, 4, 9, torch.float64, bias=True, ignored=0.3)
    options = make_options(names, inputs)
    tensors = {**inputs._asdict(), **options}
    shown = [name for name in TRAINABLE if name in tensors and isinstance(tensors[name], torch.Tensor)]

    def function(*values):
        return linear_log_probs(**{**tensors, **dict(zip(shown, values, strict=True))}, return_entropy=True)

    assert torch.autograd.gradcheck(function, tuple(tensors[name] for name in shown))


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "logit_scale"])
def test_only_one_tensor_is_trained(name) -> None:
    inputs = spoil_ignored(make_inputs(*TINY, bias=True, ignored=0.3))
    options = make_options(NAMES[-1], inputs)
    for other, tensor in {**inputs._asdict(), **options}.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.requires_grad_(other == name)
    upstream = [normal(inputs, 1), normal(inputs, 2)]
    results = call(inputs, return_entropy=True, **options)
    gradients = gradients_of(results, inputs, options, upstream)
    assert_gradients(gradients, inputs, upstream, function=reference.log_probs, **options)


def test_it_is_the_loss() -> None:
    inputs = make_inputs(*TINY, bias=True, ignored=0.3)
    options = make_options(NAMES[-1], inputs)
    loss = linear_cross_entropy(*inputs[:3], bias=inputs.bias, reduction="none", **options)
    assert torch.equal(call(inputs, **options), -loss)


def check_impossible_classes(device, softcap):
    # without a softcap they add nothing to the entropy; with one they are as good as any
    inputs = make_inputs(*TINY, device=device, bias=True)
    with torch.no_grad():
        inputs.bias[:300] = -math.inf
        inputs.targets.copy_(300 + inputs.targets % 30)
    assert_both_right(inputs, [normal(inputs, 1), normal(inputs, 2)], softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_impossible_classes(run, softcap) -> None:
    run(check_impossible_classes, softcap)


@pytest.mark.parametrize("spread", [0.0, 30.0, 200.0])
def test_even_and_certain_tokens(spread) -> None:
    inputs = make_inputs(*TINY, spread=spread)
    upstream = [normal(inputs, 1), normal(inputs, 2)]
    results = call(inputs, return_entropy=True)
    assert (results[1] >= 0).all()
    assert_both_right(inputs, upstream)
    if spread == 0:
        torch.testing.assert_close(results[1], torch.full((20,), math.log(330)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ignore_index", [IGNORED, 7])
def test_what_ignored_tokens_hold(value, ignore_index) -> None:
    inputs = make_inputs(*TINY, bias=True)
    with torch.no_grad():
        inputs.targets[::3] = ignore_index
        inputs.hidden[inputs.targets == ignore_index] = value
    options = {**make_options(NAMES[-1], inputs), "ignore_index": ignore_index}
    assert_both_right(inputs, [normal(inputs, 1), normal(inputs, 2)], **options)
    for x in call(inputs, return_entropy=True, **options):
        assert (x[::3] == 0).all()


def test_a_token_without_a_number_is_alone() -> None:
    inputs = make_inputs(*TINY, bias=True)
    with torch.no_grad():
        clean = call(inputs, return_entropy=True)
        inputs.hidden[3] = math.nan
        spoilt = call(inputs, return_entropy=True)
    for before, after in zip(clean, spoilt, strict=True):
        assert after[3].isnan()
        assert torch.equal(after[torch.arange(20) != 3], before[torch.arange(20) != 3])


@pytest.mark.parametrize("n", [0, 5])
def test_no_token(n) -> None:
    inputs = spoil_ignored(make_inputs(n, 8, 70, bias=True, ignored=1.1))
    options = make_options(NAMES[-1], inputs)
    results = call(inputs, return_entropy=True, **options)
    assert all(x.shape == (n,) and (x == 0).all() for x in results)
    gradients = gradients_of(sum(x.sum() for x in results), inputs, options)
    assert all((gradient == 0).all() for gradient in gradients if gradient is not None)


def test_leading_dimensions() -> None:
    flat = make_inputs(24, 8, 70, ignored=0.3)
    hidden = flat.hidden.detach().view(2, 3, 4, 8).requires_grad_()
    inputs = Inputs(hidden, flat.weight, flat.targets.view(2, 3, 4), None)
    assert_both_right(inputs, [normal(inputs, 1), normal(inputs, 2)])


@pytest.mark.parametrize("upstream", ["strided", "large", "one token"])
def test_upstream_gradients(upstream) -> None:
    inputs = make_inputs(*TINY, bias=True, ignored=0.3)
    match upstream:
        case "strided":
            given = [*torch.randn(20, 3, generator=torch.Generator().manual_seed(1)).unbind(1)][:2]
        case "large":
            given = [normal(inputs, 1) * 1e6, normal(inputs, 2) * 1e-6]
        case "one token":
            given = [torch.zeros(20), torch.zeros(20)]
            given[0][5], given[1][7] = -2.0, 3.0
    assert_both_right(inputs, given)


def test_fp16_of_a_large_batch() -> None:
    # entries of dx that are no numbers of fp16 alone
    inputs = make_inputs(40, 48, 200, torch.float16, ignored=0.2)
    assert_both_right(inputs, [normal(inputs, 1) * 0.02, normal(inputs, 2) * 1e-4])


def test_backward_again() -> None:
    inputs = make_inputs(*TINY, bias=True, ignored=0.3)
    results = call(inputs, return_entropy=True)
    for seed in (1, 3):
        upstream = [normal(inputs, seed), normal(inputs, seed + 1)]
        gradients = gradients_of(results, inputs, {}, upstream, retain_graph=True)
        assert_gradients(gradients, inputs, upstream, function=reference.log_probs)


def test_double_backward_raises() -> None:
    inputs = make_inputs(4, 8, 10, bias=True)
    options = make_options(NAMES[-1], inputs)
    log_probs, entropy = call(inputs, return_entropy=True, **options)
    for gradient in gradients_of(log_probs.sum() + entropy.sum(), inputs, options, create_graph=True):
        if gradient is not None:
            with pytest.raises(RuntimeError, match="no second derivative"):
                gradient.norm().backward(retain_graph=True)


def check_repeatable_whatever_the_batch(device):
    inputs = make_inputs(300, 40, 600, device=device, bias=True)
    with torch.no_grad():
        whole, again = (call(inputs, return_entropy=True, softcap=2.5) for _ in range(2))
        for size in (1, 2, 15, 17, 33, 100, 257):
            for start in {0, 300 - size}:
                rows = slice(start, start + size)
                part = call(
                    inputs._replace(hidden=inputs.hidden[rows], targets=inputs.targets[rows]),
                    return_entropy=True, softcap=2.5,
                )  # fmt: skip
                for one, other in zip(part, whole, strict=True):
                    assert torch.equal(one, other[rows]), f"{size} rows from {start}"
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


def test_a_token_does_not_depend_on_its_batch() -> None:
    check_repeatable_whatever_the_batch(torch.device("cpu"))


@pytest.mark.gpu
def test_a_token_does_not_depend_on_its_batch_on_the_gpu() -> None:
    check_repeatable_whatever_the_batch(torch.device("cuda"))


def test_autocast() -> None:
    inputs = make_inputs(*TINY, torch.float16, bias=True, ignored=0.2)
    master = [x.detach().float().requires_grad_() for x in (inputs.hidden, inputs.weight, inputs.bias)]
    with torch.autocast("cpu", torch.float16):
        results = linear_log_probs(*master[:2], inputs.targets, bias=master[2], return_entropy=True)
    assert_log_probs(*(x.detach() for x in results), inputs)
    upstream = [normal(inputs, 1), normal(inputs, 2)]
    gradients = torch.autograd.grad(results, master, upstream)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert_gradients([g.half() for g in gradients], inputs, upstream, function=reference.log_probs)


# what it is used for


def test_a_temperature_for_each_token() -> None:
    # logits over a temperature are those of hidden states over it
    inputs = make_inputs(*TINY, ignored=0.3)
    temperature = torch.rand(20, generator=torch.Generator().manual_seed(4)) + 0.5
    results = linear_log_probs(
        inputs.hidden / temperature[:, None], inputs.weight, inputs.targets, return_entropy=True
    )
    product = inputs.hidden.double() @ inputs.weight.double().T / temperature.double()[:, None]
    truth = reference.log_probs(product, inputs.targets)
    upstream = [normal(inputs, 1), normal(inputs, 2)]
    gradients = torch.autograd.grad(results, inputs[:2], upstream)
    expected = torch.autograd.grad(truth, inputs[:2], [u.double() for u in upstream])
    for ours, theirs in zip((*results, *gradients), (*truth, *expected), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-5)


def test_a_policy_gradient_by_weights_is_that_by_log_probs() -> None:
    inputs = make_inputs(*TINY, bias=True, ignored=0.3)
    advantages = normal(inputs, 5)
    valid = inputs.targets != IGNORED
    weighted = linear_cross_entropy(*inputs[:3], bias=inputs.bias, token_weight=advantages, denominator=valid.sum())
    # at the policy itself the ratio is 1, and its gradient that of the logarithm
    log_probs = call(inputs)
    ratio = (log_probs - log_probs.detach()).exp()
    surrogate = -(ratio * advantages)[valid].sum() / valid.sum()
    upstream = -advantages / valid.sum()
    for loss in (weighted, surrogate):
        gradients = gradients_of(loss, inputs, {})
        assert_gradients(gradients, inputs, [upstream, torch.zeros_like(upstream)], function=reference.log_probs)


class Allocations(TorchDispatchMode):
    """The sizes of all that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return results


@pytest.mark.parametrize("what", ["log_probs", "entropy", "statistics"])
def test_evaluation_holds_statistics_alone(what) -> None:
    n, d, v = 512, 8, 20_000
    inputs = make_inputs(n, d, v)
    with torch.no_grad(), Allocations() as seen:
        if what == "statistics":
            linear_cross_entropy(*inputs[:3], return_stats=True)
        else:
            call(inputs, return_entropy=what == "entropy")
    # some tiles at a time are the largest, for as many tokens as there may be
    assert n * d <= seen.largest <= PASS
    assert n * v > 9 * PASS


def check_head(device):
    inputs = make_inputs(12, 24, 101, device=device, bias=True, ignored=0.2)
    head = VocabParallelLMHead(24, 101, bias=True, device=device)
    with torch.no_grad():
        head.weight.copy_(inputs.weight)
        head.bias.copy_(inputs.bias)
    results = head.log_probs(inputs.hidden, inputs.targets, softcap=2.5, return_entropy=True)
    assert_log_probs(*(x.detach() for x in results), inputs, softcap=2.5)
    upstream = [normal(inputs, 1), normal(inputs, 2)]
    gradients = torch.autograd.grad(results, [inputs.hidden, head.weight, head.bias], upstream)
    assert_gradients(gradients, inputs, upstream, function=reference.log_probs, softcap=2.5)
    loss, stats = head.loss(inputs.hidden, inputs.targets, softcap=2.5, z_loss=0.02, return_stats=True)
    torch.testing.assert_close(stats.log_prob, results[0].detach(), rtol=1e-5, atol=1e-5)
    assert loss.requires_grad


def test_the_head_has_it() -> None:
    check_head(torch.device("cpu"))


MISTAKES = [
    ({"hidden": torch.zeros(4, 7)}, ValueError, r"weight must have the shape \[V, 7\]"),
    ({"targets": torch.zeros(5, dtype=torch.int64)}, ValueError, r"targets must have the shape \(4,\)"),
    ({"targets": torch.tensor([0, 1, 10, 3])}, IndexError, r"targets must lie in \[0, 10\)"),
    ({"bias": torch.zeros(9)}, ValueError, r"bias must have the shape \(10,\)"),
    ({"logit_scale": torch.zeros(2)}, ValueError, r"logit_scale .*\(2,\)"),
    ({"logit_scale": math.inf}, ValueError, "logit_scale .*inf"),
    ({"softcap": 0}, ValueError, "softcap .*0"),
    ({"softcap": True}, TypeError, "softcap .*bool"),
    ({"memory_budget": 10}, ValueError, "memory_budget: nothing fits 10 bytes"),
    ({"shard": (0, 10)}, TypeError, "shard must be a VocabShard, got tuple"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: next(iter(m[0])))
def test_mistakes(mistake) -> None:
    changes, error, message = mistake
    good = {
        "hidden": torch.zeros(4, 8, requires_grad=True),
        "weight": torch.zeros(10, 8),
        "targets": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(error, match=message):
        linear_log_probs(**{**good, **changes})
