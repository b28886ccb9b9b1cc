"""The loss and its gradients on one device: torch twins, interpreted Triton kernels, and the GPU's."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from inputs import IGNORED, Inputs, make_inputs, make_trained_inputs
from plans import forced_plan
from tolerance import assert_gradient, assert_gradients, assert_loss, reference_gradients

from cce_dist import linear_cross_entropy
from cce_dist.kernels import runtime
from cce_dist.kernels.rows import NO_TARGET, pack_order

HALF = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALF]


def usable(dtype: torch.dtype) -> bool:
    """Triton 3.9's interpreter gets ``tl.dot(a, b.T)`` of bf16 tiles wrong that descriptors have loaded."""
    return not (runtime.INTERPRETED and dtype == torch.bfloat16)


def loss_of(inputs: Inputs, **options) -> torch.Tensor:
    return linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias, **options)


def grads(inputs: Inputs) -> list[torch.Tensor | None]:
    return [inputs.hidden.grad, inputs.weight.grad, None if inputs.bias is None else inputs.bias.grad]


def assert_right(inputs: Inputs, upstream=None, *, yardstick="operands", method=None, **options) -> torch.Tensor:
    """The loss and all gradients, against the reference."""
    loss = loss_of(inputs, method=method, **options)
    assert_loss(loss.detach(), inputs, **options)
    loss.backward(upstream)
    assert_gradients(grads(inputs), inputs, upstream, yardstick=yardstick, **options)
    return loss


def zero_everywhere(tensor: torch.Tensor) -> bool:
    return bool((tensor == 0).all())


def check_shape(device, dtype, n, d, v, spread, bias, ignored):
    inputs = make_inputs(n, d, v, dtype, device=device, spread=spread, bias=bias, ignored=ignored, seed=n + d + v)
    # the methods that keep exponentials round hidden states once more: their promise is a trained model's
    assert_right(inputs, method="recompute" if dtype in HALF else None)


# the interpreter's tiles are 32 x 64 x 32, the twins' 256 wide, packed rows come in groups of 16
RAGGED = [
    (1, 1, 1, 1.0, False, 0.0),
    (1, 32, 64, 1.0, True, 0.0),
    (32, 32, 64, 1.0, False, 0.0),
    (31, 33, 63, 0.01, -30.0, 0.2),
    (33, 31, 65, 0.01, -30.0, 0.2),
    (17, 40, 129, 8.0, True, 0.3),
    (65, 7, 257, 0.01, -30.0, 0.0),
    (15, 64, 255, 30.0, False, 0.5),
    (2, 100, 513, 0.01, -30.0, 0.0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", RAGGED, ids=lambda s: "x".join(map(str, s[:3])))
def test_ragged_shapes(run, request, dtype, shape) -> None:
    if dtype == torch.bfloat16 and "interpreter" in request.node.name:
        pytest.skip("Triton 3.9's interpreter gets products of transposed bf16 tiles wrong")
    run(check_shape, dtype, *shape)


@pytest.mark.parametrize("shape", RAGGED[:6], ids=lambda s: "x".join(map(str, s[:3])))
def test_double_precision(shape) -> None:
    n, d, v, spread, bias, ignored = shape
    assert_right(make_inputs(n, d, v, torch.float64, spread=spread, bias=bias, ignored=ignored))


def check_trained_model(device, dtype, n, d, v):
    # every token weighed differently
    inputs = make_trained_inputs(n, d, v, dtype, device=device)
    upstream = (torch.rand(n, generator=torch.Generator().manual_seed(1)) + 0.5).to(device)
    losses = assert_right(inputs, upstream, yardstick="output", reduction="none")
    assert losses.min() < 1e-3
    assert losses.max() > 8


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_promise_for_a_trained_model(run, request, dtype) -> None:
    interpreted = "interpreter" in request.node.name
    if dtype == torch.bfloat16 and interpreted:
        pytest.skip("Triton 3.9's interpreter gets products of transposed bf16 tiles wrong")
    run(check_trained_model, dtype, *((128, 64, 1024) if interpreted else (512, 256, 4096)))


def check_promise(device, dtype, n, d, v, ignored):
    assert_right(make_inputs(n, d, v, dtype, device=device, spread=0.5, ignored=ignored), yardstick="output")


@pytest.mark.parametrize(("dtype", "v"), [(torch.bfloat16, 8193), (torch.float16, 65537)], ids=["bf16", "fp16"])
def test_16_bit_gradients_are_as_good_as_rounding_once(dtype, v) -> None:
    # a count of tokens that is no power of two: its mantissa must not reach the rounded panels
    check_promise(torch.device("cpu"), dtype, 67, 32, v, 0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_16_bit_gradients_are_as_good_as_rounding_once_on_the_gpu(dtype) -> None:
    check_promise(torch.device("cuda"), dtype, 1111, 256, 65537, 0.2)


def check_reductions(device, reduction, denominator):
    inputs = make_inputs(21, 40, 131, device=device, bias=True, ignored=0.3)
    options = {"reduction": reduction}
    if denominator == "tensor":
        options["denominator"] = torch.tensor(123.0, device=device)
    elif denominator is not None:
        options["denominator"] = denominator
    upstream = torch.rand(21, generator=torch.Generator().manual_seed(1)).to(device) if reduction == "none" else None
    loss = assert_right(inputs, upstream, **options)
    if reduction == "none":
        assert zero_everywhere(loss[inputs.targets == IGNORED])


@pytest.mark.parametrize(
    ("reduction", "denominator"),
    [("mean", None), ("sum", None), ("none", None), ("mean", 57), ("mean", 0.5), ("mean", "tensor")],
)
def test_reductions_and_denominators(run, reduction, denominator) -> None:
    run(check_reductions, reduction, denominator)


def check_nothing_to_do(device, n, reduction, denominator):
    inputs = make_inputs(n, 8, 70, device=device, bias=True, ignored=1.1)
    with torch.no_grad():
        inputs.hidden.fill_(math.nan)
    loss = loss_of(inputs, reduction=reduction, denominator=denominator)
    assert loss.requires_grad
    assert loss.shape == ((n,) if reduction == "none" else ())
    assert zero_everywhere(loss)
    loss.sum().backward()
    for gradient in grads(inputs):
        assert gradient is not None
        assert zero_everywhere(gradient)


@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize(("reduction", "denominator"), [("mean", None), ("sum", None), ("none", None), ("mean", 0.5)])
def test_no_token_gives_zero_on_the_graph(run, n, reduction, denominator) -> None:
    run(check_nothing_to_do, n, reduction, denominator)


def check_all_ignored_with_a_denominator_of_zero(device):
    inputs = make_inputs(5, 8, 70, device=device, ignored=1.1)
    loss = loss_of(inputs, denominator=torch.zeros((), device=device))
    loss.backward()
    assert zero_everywhere(loss)
    assert zero_everywhere(inputs.hidden.grad)


def test_no_token_and_a_count_of_zero(run) -> None:
    # the global count is a tensor: where a whole step is ignored it holds 0
    run(check_all_ignored_with_a_denominator_of_zero)


def check_ignored_rows(device, poison, ignore_index):
    inputs = make_inputs(37, 24, 100, device=device, bias=True)
    ignored = torch.arange(37, device=device) % 3 == 1
    with torch.no_grad():
        inputs.targets[ignored] = ignore_index
        inputs.hidden[ignored] = poison
    assert_right(inputs, ignore_index=ignore_index)
    assert zero_everywhere(inputs.hidden.grad[ignored])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_ignored_rows_add_nothing_whatever_they_hold(run, poison) -> None:
    run(check_ignored_rows, poison, IGNORED)


def test_ignore_index_may_be_a_class(run) -> None:
    run(check_ignored_rows, math.nan, 7)


def check_upstream(device, kind):
    inputs = make_inputs(18, 24, 100, torch.float16 if kind == "tiny" else torch.float32, device=device)
    generator = torch.Generator().manual_seed(3)
    reduction = "none"
    match kind:
        case "strided":
            upstream = torch.randn(18, 3, generator=generator).to(device)[:, 1]
        case "expanded":
            upstream = torch.tensor(0.37, device=device).expand(18)
        case "zero":
            upstream = torch.zeros(18, device=device)
        case "one token":
            upstream = torch.zeros(18, device=device)
            upstream[5] = -2.0
        case "ones but one":
            # a shortcut for a gradient of 1 that looks at some of it would take it
            upstream = torch.ones(18, device=device)
            upstream[5] = 3.0
        case "tiny":
            upstream = torch.full((18,), 2.0**-3, device=device)
        case "scaled":
            upstream, reduction = torch.tensor(-3.3, device=device), "mean"
    assert_right(inputs, upstream, reduction=reduction)


@pytest.mark.parametrize("kind", ["strided", "expanded", "zero", "one token", "ones but one", "tiny", "scaled"])
def test_any_upstream_gradient(run, kind) -> None:
    run(check_upstream, kind)


def check_linear_in_upstream(device):
    inputs = make_inputs(18, 24, 100, device=device)
    loss = loss_of(inputs, reduction="none")
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(18, generator=generator).to(device) * 1e4
    both = [torch.autograd.grad(loss, inputs[:2], factor * wide, retain_graph=True) for factor in (1.0, 2.0**-30)]
    for large, small in zip(*both, strict=True):
        assert torch.equal(large * 2.0**-30, small)


def test_backward_is_linear_over_many_magnitudes(run) -> None:
    run(check_linear_in_upstream)


def check_twice(device, method):
    inputs = make_inputs(18, 24, 100, device=device, bias=True)
    loss = loss_of(inputs, method=method)
    loss.backward(retain_graph=True)
    first = [gradient.clone() for gradient in grads(inputs)]
    loss.backward()
    assert all(torch.equal(2 * one, two) for one, two in zip(first, grads(inputs), strict=True))


@pytest.mark.parametrize("method", ["recompute", "cached"])
def test_backward_twice(run, method) -> None:
    run(check_twice, method)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_raises(reduction) -> None:
    inputs = make_inputs(4, 8, 10)
    loss = loss_of(inputs, reduction=reduction)
    for upstream in (torch.ones_like(loss), torch.ones_like(loss, requires_grad=True)):
        gradient, _ = torch.autograd.grad(loss, inputs[:2], upstream, create_graph=True)
        with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
            gradient.norm().backward()


def test_gradcheck() -> None:
    inputs = make_inputs(7, 5, 11, torch.float64, bias=True, ignored=0.3)

    def function(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, inputs.targets, bias=bias, reduction="none")

    assert torch.autograd.gradcheck(function, (inputs.hidden, inputs.weight, inputs.bias))


def check_layout(device, layout):
    plain = make_inputs(24, 20, 70, device=device, bias=True, ignored=0.2)
    hidden, weight, targets, bias = plain.hidden.detach(), plain.weight.detach(), plain.targets, plain.bias.detach()
    match layout:
        case "leading dimensions":
            hidden, targets = hidden.view(2, 3, 4, 20), targets.view(2, 3, 4)
        case "transposed hidden":
            hidden = hidden.T.contiguous().T
        case "sliced hidden":
            hidden = torch.cat([hidden, torch.full_like(hidden, math.nan)], 1)[:, :20]
        case "shifted sequence":
            hidden = torch.cat([hidden.view(4, 6, 20), hidden.new_full((4, 1, 20), math.nan)], 1)[:, :-1]
            targets = torch.cat([targets.new_full((4, 1), 99999), targets.view(4, 6)], 1)[:, 1:]
        case "expanded hidden":
            hidden, targets = hidden[:1].expand(24, 20), targets
        case "transposed weight":
            weight = weight.T.contiguous().T
        case "sliced weight":
            weight = torch.cat([weight, torch.full_like(weight, math.nan)], 1)[:, :20]
        case "every other row of weight":
            weight = torch.stack([weight, torch.full_like(weight, math.nan)], 1).flatten(0, 1)[::2]
        case "strided targets":
            targets = torch.stack([targets, targets + 99999], 1)[:, 0]
        case "int32 targets":
            targets = targets.int()
        case "strided bias":
            bias = torch.stack([bias, torch.full_like(bias, math.nan)], 1)[:, 0]
        case "unaligned":
            hidden = torch.cat([hidden.flatten(), hidden.new_zeros(1)]).roll(1)[1:].view(24, 20)
            weight = torch.cat([weight.flatten(), weight.new_zeros(1)]).roll(1)[1:].view(70, 20)
    kept = [x.clone() for x in (hidden, weight, targets, bias)]
    assert_right(Inputs(hidden.requires_grad_(), weight.requires_grad_(), targets, bias.requires_grad_()))
    for after, before in zip((hidden, weight, targets, bias), kept, strict=True):
        assert torch.equal(after, before), "an input was written to"


@pytest.mark.parametrize(
    "layout",
    [
        "leading dimensions", "transposed hidden", "sliced hidden", "shifted sequence", "expanded hidden",
        "transposed weight", "sliced weight", "every other row of weight", "strided targets", "int32 targets",
        "strided bias", "unaligned",
    ],
)  # fmt: skip
def test_layouts(run, layout) -> None:
    run(check_layout, layout)


def check_confident(device, dtype):
    # one logit far above the others: p = 0.9997, and what is left of the gradient is p - 1
    inputs = make_inputs(40, 64, 129, dtype, device=device, spread=0.05)
    with torch.no_grad():
        rows = torch.randperm(129, generator=torch.Generator().manual_seed(2))[:40].to(device)
        inputs.targets.copy_(rows)
        inputs.hidden.copy_(torch.nn.functional.one_hot(torch.arange(40), 64).to(device) * 13.0)
        inputs.weight[rows] = torch.nn.functional.one_hot(torch.arange(40), 64).to(device, dtype)
    loss = assert_right(inputs)
    assert 1e-4 < loss.item() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_confident_tokens_keep_their_gradient(run, dtype) -> None:
    run(check_confident, dtype)


def check_loss_scale(device):
    inputs = make_inputs(40, 48, 200, torch.float16, device=device)
    # the gradients are representable, their parts before the scale are not
    (loss_of(inputs) * 65536.0 * 2.0**-10).backward()
    assert_gradients(grads(inputs), inputs, torch.tensor(64.0))
    inputs.hidden.grad = inputs.weight.grad = None
    faint = torch.tensor(2.0**-14)
    (loss_of(inputs) * 65536.0 * faint.to(device)).backward()
    assert_gradients(grads(inputs), inputs, torch.tensor(4.0))


def test_fp16_under_a_loss_scale(run) -> None:
    run(check_loss_scale)


def check_loss_scale_of_many_tokens(device):
    inputs = make_inputs(40, 48, 200, torch.float16, device=device)
    # a denominator as of a large job: without the scale every entry of dx would be subnormal or zero in fp16
    loss = loss_of(inputs, denominator=4e6) * 65536.0
    loss.backward()
    assert_gradients(grads(inputs), inputs, torch.tensor(65536.0), denominator=4e6)


def test_fp16_with_a_large_token_count(run) -> None:
    run(check_loss_scale_of_many_tokens)


def check_extreme_upstream(device, dtype):
    # past the dtype's range the gradient is infinite, below it 0, and never NaN: what rounding the true one gives
    for factor in (1e38, 1e-42):
        inputs = make_inputs(20, 16, 50, dtype, device=device)
        (loss_of(inputs) * factor).backward()
        expected = reference_gradients(inputs, torch.tensor(factor, dtype=torch.float64), torch.float64, {})
        for gradient, truth in zip(grads(inputs)[:2], expected, strict=True):
            rounded = truth.float().to(dtype)
            assert torch.equal(gradient.isinf(), rounded.isinf())
            assert not gradient.isnan().any()
            # what is left of so small numbers: a few of the smallest that fp32 has
            assert factor > 1 or (gradient.double() - rounded.double()).abs().max() < 100 * 2.0**-149


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_extreme_upstream_gradients(run, dtype) -> None:
    run(check_extreme_upstream, dtype)


def check_infinite_class(device):
    # a class whose logits are all -inf: p = 0, and no NaN comes of the rows that pad a batch
    inputs = make_inputs(37, 24, 130, device=device)
    with torch.no_grad():
        inputs.hidden.abs_()
        inputs.weight[5] = -math.inf
        inputs.targets[inputs.targets == 5] = 6
    loss_of(inputs).backward()
    assert zero_everywhere(inputs.weight.grad[5])


def test_a_class_of_minus_infinity(run) -> None:
    run(check_infinite_class)


def test_no_target_displaces_another() -> None:
    # as on a GPU, where targets are not looked at beforehand
    for target in (-5, 90, 2**62, 2**63 - 1):
        targets = torch.tensor([3, IGNORED, target, 4])
        ids, order, count = pack_order(targets, IGNORED)
        assert count == 3
        assert order[3] == 1
        assert (ids[3:] == NO_TARGET).all()
        assert sorted(order[:3].tolist()) == [0, 2, 3]


def check_one_class(device):
    # the sum over a class's tokens is far past fp16 in the panel's units, and within it in the result's
    inputs = make_inputs(256, 40, 90, torch.float16, device=device, spread=0.2)
    with torch.no_grad():
        inputs.targets.fill_(7)
        inputs.hidden[:, 3] = 300.0
        inputs.weight[:, 3] = 0.0
    assert_right(inputs)


def test_many_tokens_of_one_class(run) -> None:
    run(check_one_class)


def check_poisoned_upstream(device, dtype, value):
    inputs = make_inputs(20, 16, 90, dtype, device=device)
    upstream = torch.ones(20, device=device)
    loss_of(inputs, reduction="none").backward(upstream)
    clean, inputs.hidden.grad = inputs.hidden.grad, None
    upstream[3] = value
    loss_of(inputs, reduction="none").backward(upstream)
    assert not inputs.hidden.grad[3].isfinite().any()
    others = torch.arange(20, device=device) != 3
    assert torch.equal(inputs.hidden.grad[others], clean[others])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_poisoned_upstream_gradient_is_its_own_token_s(run, dtype, value) -> None:
    run(check_poisoned_upstream, dtype, value)


def test_the_default_dtype_does_not_show() -> None:
    inputs = make_inputs(300, 16, 90, bias=True)
    torch.set_default_dtype(torch.float16)
    try:
        # neither is a number of fp16
        for denominator in (300.7, 1e39, Fraction(1, 3), torch.tensor(1e30, dtype=torch.float64)):
            loss = loss_of(inputs, denominator=denominator)
            expected = loss_of(inputs, reduction="sum").double() / float(denominator)
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-45)
        loss_of(inputs, denominator=300.7).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_gradients(grads(inputs), inputs, denominator=300.7)


def check_poisoned_logits(device, value):
    inputs = make_inputs(20, 16, 130, device=device)
    with torch.no_grad():
        inputs.hidden[3] = value
    loss = loss_of(inputs, reduction="none")
    assert loss[3].isnan()
    rest = torch.arange(20, device=device) != 3
    assert loss[rest].isfinite().all()
    loss.sum().backward()
    assert inputs.hidden.grad[3].isnan().any()
    assert inputs.hidden.grad[rest].isfinite().all()
    assert loss_of(inputs).isnan()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_not_swallowed(run, value) -> None:
    run(check_poisoned_logits, value)


def check_nan_among_infinities(device, impossible):
    # the guard for tiles of -inf, whose maximum less itself is NaN, must not take a NaN for one of them
    inputs = make_inputs(4, 8, 130, device=device, bias=True)
    with torch.no_grad():
        inputs.bias[:impossible] = -math.inf
        inputs.bias[5] = math.nan
        inputs.targets.copy_(64 + inputs.targets % 66)
    loss = loss_of(inputs, reduction="none")
    assert loss.isnan().all()
    loss.sum().backward()
    assert inputs.hidden.grad.isnan().all()


# of a tile no column, all but it, and of the twin's
@pytest.mark.parametrize("impossible", [0, 64, 130])
def test_a_class_of_nan_is_not_taken_for_one_of_minus_infinity(run, request, impossible) -> None:
    if "interpreter" in request.node.name and impossible != 64 and not request.config.getoption("--slow"):
        pytest.skip("slow: needs --slow")
    run(check_nan_among_infinities, impossible)


def check_plus_infinity(device):
    inputs = make_inputs(20, 16, 130, device=device, bias=True)
    with torch.no_grad():
        inputs.bias[77] = math.inf
    assert loss_of(inputs, reduction="none").isnan().all()


def test_an_infinite_logit_gives_nan(run) -> None:
    run(check_plus_infinity)


def check_minus_infinity(device):
    # tiles of -inf from end to end, the first among them
    inputs = make_inputs(20, 16, 600, device=device, bias=True)
    with torch.no_grad():
        inputs.bias[:300] = -math.inf
        inputs.targets.copy_(300 + inputs.targets % 300)
    assert_right(inputs)
    assert zero_everywhere(inputs.weight.grad[:300])
    with torch.no_grad():
        inputs.targets[0] = 5
    loss = loss_of(inputs, reduction="none")
    assert loss[0] == math.inf
    assert loss[1:].isfinite().all()


def test_columns_of_minus_infinity(run) -> None:
    run(check_minus_infinity)


def check_frozen(device, trained):
    inputs = make_inputs(20, 16, 130, device=device, bias=True, ignored=0.2)
    for index, name in enumerate(("hidden", "weight", "targets", "bias")):
        if name not in trained and name != "targets":
            inputs[index].requires_grad_(False)
    loss = loss_of(inputs)
    loss.backward()
    assert_gradients(grads(inputs), inputs)
    for index, name in enumerate(("hidden", "weight", "targets", "bias")):
        assert (inputs[index].grad is not None) == (name in trained)


@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("weight", "bias")])
def test_frozen_inputs_get_no_gradient(run, trained) -> None:
    run(check_frozen, trained)


def test_nothing_to_train() -> None:
    inputs = make_inputs(20, 16, 130)
    with torch.no_grad():
        assert not loss_of(inputs).requires_grad


def check_panels(device, dtype):
    inputs = make_inputs(70, 24, 1500, dtype, device=device, bias=True, ignored=0.2)
    with forced_plan() as plans:
        whole = loss_of(inputs, reduction="none", method="recompute")
    assert plans[0].panel >= 1024
    with forced_plan(panel=256, wide=0), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cce_dist.autograd.operands.token_chunk", lambda *sizes: 32)
        loss = loss_of(inputs, reduction="none", method="recompute")
        assert torch.equal(loss, whole), "the loss depends on the chunks"
        loss.mean().backward()
    assert_gradients(grads(inputs), inputs, torch.tensor(1 / 70), reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_panels_and_chunks(run, dtype) -> None:
    run(check_panels, dtype)


def check_repeatable(device):
    results = []
    for _ in range(3):
        inputs = make_inputs(65, 40, 700, torch.float16, device=device, bias=True, ignored=0.1)
        loss = loss_of(inputs)
        loss.backward()
        results.append([loss, *grads(inputs)])
    assert all(torch.equal(one, other) for again in results[1:] for one, other in zip(results[0], again, strict=True))


def test_runs_repeat_bit_for_bit(run) -> None:
    run(check_repeatable)


def check_batch_invariance(device, sizes, moved):
    n = max(sizes)
    inputs = make_inputs(n, 40, 300, device=device)
    if not moved:
        # rows are packed in the order of their targets
        inputs.targets.copy_(inputs.targets.sort().values)
    whole = loss_of(inputs, reduction="none")
    with torch.no_grad():
        for size in sizes:
            for start in {0, n - size if moved else (n - size) // 32 * 32}:
                rows = slice(start, start + size)
                part = linear_cross_entropy(
                    inputs.hidden[rows], inputs.weight, inputs.targets[rows], reduction="none"
                )
                assert torch.equal(part, whole[rows]), f"{size} rows from {start}"
        # other tokens' states, targets, and whether they are ignored
        others = torch.arange(n, device=device) % 3 != 0
        hidden, targets = inputs.hidden.clone(), inputs.targets.clone()
        hidden[others] *= 7
        if moved:
            targets[others] = 5
            targets[1::6] = IGNORED
        again = linear_cross_entropy(hidden, inputs.weight, targets, reduction="none")
        assert torch.equal(again[~others], whole[~others])


def test_a_loss_does_not_depend_on_the_batch(run, request) -> None:
    # numpy's products, which the interpreter takes, have other bits where a row has another place in its tile
    moved = "interpreter" not in request.node.name
    sizes = [*range(1, 40), 100, 127, 255, 256, 257, 333, 600] if moved else [1, 2, 15, 33, 70]
    run(check_batch_invariance, sizes, moved)


@pytest.mark.parametrize("target", [-1, 100, 2**40, -(2**40)])
def test_targets_outside_the_vocabulary(target) -> None:
    inputs = make_inputs(10, 8, 100)
    inputs.targets[4] = target
    with pytest.raises(IndexError, match=rf"targets must lie in \[0, 100\).*got {target}"):
        loss_of(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("target", [-1, 100, 2**40, -(2**40)])
def test_targets_outside_the_vocabulary_on_the_gpu(target) -> None:
    inputs = make_inputs(10, 8, 100, device="cuda")
    whole = loss_of(inputs, reduction="none")
    inputs.targets[4] = target
    loss = loss_of(inputs, reduction="none")
    assert loss[4].isnan()
    rest = torch.arange(10, device="cuda") != 4
    assert torch.equal(loss[rest], whole[rest])


def check_autocast(device, dtype, hidden_dtype):
    inputs = make_inputs(20, 16, 130, dtype, device=device, bias=True)
    master = [x.detach().float().requires_grad_() for x in (inputs.weight, inputs.bias)]
    hidden = inputs.hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast(device.type, dtype):
        loss = linear_cross_entropy(hidden, master[0], inputs.targets, bias=master[1])
    loss.backward()
    assert_loss(loss.detach(), inputs)
    assert [x.grad.dtype for x in (hidden, *master)] == [hidden_dtype, torch.float32, torch.float32]
    assert_gradients([x.grad.to(dtype) for x in (hidden, *master)], inputs)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_casts_as_linear_does(run, hidden_dtype) -> None:
    run(check_autocast, torch.float16, hidden_dtype)


def test_autocast_leaves_double_precision_alone() -> None:
    inputs = make_inputs(20, 16, 130, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert_loss(loss_of(inputs).detach(), inputs)


@pytest.mark.parametrize(
    ("of_hidden", "of_weight"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_mixed_dtypes_are_refused_and_autocast_takes_them(of_hidden, of_weight) -> None:
    inputs = make_inputs(40, 16, 130, torch.bfloat16, ignored=0.2)
    hidden, weight = (
        x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs, (of_hidden, of_weight), strict=False)
    )
    with pytest.raises(TypeError, match=f"weight is {of_weight}, hidden {of_hidden}: expected one dtype"):
        linear_cross_entropy(hidden, weight, inputs.targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, inputs.targets)
    assert_loss(loss.detach(), inputs)
    loss.backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (of_hidden, of_weight)
    assert_gradients([hidden.grad.bfloat16(), weight.grad.bfloat16(), None], inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["recompute", "cached", "fused"])
def test_a_device_that_is_not_the_current_one(method) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        assert_right(make_inputs(70, 40, 700, device="cuda:1", bias=True, ignored=0.2), method=method)
        assert torch.cuda.current_device() == 0


def test_the_tolerance_helper_can_fail() -> None:
    inputs = make_inputs(40, 48, 200, torch.bfloat16, bias=True)
    loss = loss_of(inputs)
    with pytest.raises(AssertionError, match="off that of the reference"):
        assert_loss(loss.detach() * (1 + 2e-5), inputs)
    loss.backward()
    truth = reference_gradients(inputs, None, torch.float64, {})
    for index, name in enumerate(("hidden", "weight", "bias")):
        gradient = grads(inputs)[index]
        spoiled = list(grads(inputs))
        spoiled[index] = (gradient.float() * 1.01).to(gradient.dtype)
        with pytest.raises(AssertionError, match=name):
            assert_gradients(spoiled, inputs)
        with pytest.raises(AssertionError, match="not finite"):
            assert_gradient(gradient * math.nan, truth[index], [truth[index]])
