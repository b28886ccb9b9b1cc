"""What changes a token's loss or its part in the result: each option, pairs of them, and all together."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from inputs import IGNORED, OPTIONS, TRAINABLE, Inputs, gradients_of, make_inputs, make_options, make_trained_inputs
from plans import SEAMS, forced_plan
from tolerance import assert_gradients, assert_loss

from cce_dist import LinearCrossEntropyLoss, TokenStats, linear_cross_entropy, reference

hypothesis = pytest.importorskip("hypothesis")
import fuzz  # noqa: E402

METHODS = ["recompute", "cached", "fused"]
SINGLE = [(name,) for name in OPTIONS]
PAIRS = [*combinations(OPTIONS, 2)]
# all that the methods which keep exponentials take together
MANY = [OPTIONS, *(tuple(x for x in OPTIONS if x != without) for without in ("softcap", "label_smoothing"))]
COMBINATIONS = [*SINGLE, *PAIRS, *MANY]
# fills a chunk and kept columns of SEAMS, lent ones too, and leaves others
TINY = (20, 32, 600)
# the edges of tiles, among them those of the interpreter's 64 columns
WIDTHS = [2, 63, 64, 65, 255, 256, 257, 513]


def loss_of(inputs: Inputs, **options):
    return linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias, **options)


def taken(method: str, names) -> bool:
    """Whether a method takes the options together."""
    return method == "recompute" or not {"softcap", "label_smoothing"} <= set(names)


def frozen_by(method: str | None) -> tuple[str, ...]:
    return ("token_weight",) if method == "fused" else ()


def spoil_ignored(inputs: Inputs, value: float = math.nan) -> Inputs:
    with torch.no_grad():
        inputs.hidden[inputs.targets == IGNORED] = value
    return inputs


def upstream_for(shape, device, seed=1) -> torch.Tensor:
    """Of either sign."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 3 - 1).to(device)


def assert_right(inputs: Inputs, options, upstream=None, *, method=None, yardstick="operands") -> torch.Tensor:
    """The loss and all gradients, against the reference."""
    loss = loss_of(inputs, method=method, **options)
    assert_loss(loss.detach(), inputs, **options)
    gradients = gradients_of(loss, inputs, options, upstream)
    assert_gradients(gradients, inputs, upstream, yardstick=yardstick, **options)
    return loss.detach()


def assert_same_bits(ones, others) -> None:
    for one, other in zip(ones, others, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def check_options(device, dtype, method, names, size):
    make, yardstick = make_inputs, "operands"
    if dtype == torch.bfloat16:
        make, yardstick = make_trained_inputs, "output"
    inputs = spoil_ignored(make(*size, dtype, device=device, bias=True, ignored=0.3))
    options = make_options(names, inputs, frozen=frozen_by(method))
    options["reduction"] = "mean" if method == "fused" else "none"
    base = loss_of(inputs, method="recompute", **options).detach()
    upstream = upstream_for(base.shape, device)
    # sums of fp16 do not wait for blocks of tokens
    seams = {name: x for name, x in SEAMS[method].items() if name != "rows" or dtype != torch.float16}
    with forced_plan(**seams) as plans:
        loss = loss_of(inputs, method=method, **options)
        assert plans[-1].method == method
        assert torch.equal(loss.detach(), base), "the loss depends on the method"
        gradients = gradients_of(loss, inputs, options, upstream)
        again = loss_of(inputs, method=method, **options)
        assert_same_bits([loss, *gradients], [again, *gradients_of(again, inputs, options, upstream)])
    assert_loss(base, inputs, **options)
    assert_gradients(gradients, inputs, upstream, yardstick=yardstick, **options)
    assert (gradients[0][inputs.targets == IGNORED] == 0).all()


BY_METHOD = [(method, names) for method in METHODS for names in COMBINATIONS if taken(method, names)]
by_method = pytest.mark.parametrize(
    ("method", "names"), BY_METHOD, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
# what the interpreter, a hundred times as slow as the twins, is asked
INTERPRETED = [("recompute", OPTIONS), ("fused", MANY[1])]


@by_method
def test_every_combination(run, request, method, names) -> None:
    slow = request.config.getoption("--slow")
    if "interpreter" in request.node.name and (method, names) not in INTERPRETED and not slow:
        pytest.skip("slow: needs --slow")
    run(check_options, torch.float32, method, names, TINY)


@pytest.mark.parametrize("names", [*SINGLE, OPTIONS], ids="-".join)
def test_fp16(run, request, names) -> None:
    if "interpreter" in request.node.name and len(names) == 1 and not request.config.getoption("--slow"):
        pytest.skip("slow: needs --slow")
    run(check_options, torch.float16, "recompute", names, TINY)


@pytest.mark.parametrize(
    ("method", "names"),
    [x for x in BY_METHOD if len(x[1]) != 2],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_bf16(run, request, method, names) -> None:
    if "interpreter" in request.node.name:
        pytest.skip("Triton 3.9's interpreter gets products of transposed bf16 tiles wrong")
    run(check_options, torch.bfloat16, method, names, (200, 64, 700))


@by_method
def test_double_precision(method, names) -> None:
    check_options(torch.device("cpu"), torch.float64, method, names, TINY)


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize(
    ("reduction", "denominator"), [("mean", None), ("mean", 57.5), ("sum", None), ("none", None)]
)
def test_reductions(reduction, denominator, names) -> None:
    for method in ("recompute", "cached") if reduction == "none" else METHODS:
        if not taken(method, names):
            continue
        inputs = spoil_ignored(make_inputs(*TINY, ignored=0.3))
        options = make_options(names, inputs, frozen=frozen_by(method)) | {"reduction": reduction}
        if denominator is not None:
            options["denominator"] = torch.tensor(denominator) if method == "cached" else denominator
        upstream = upstream_for(20, "cpu") if reduction == "none" else torch.tensor(-1.7)
        with forced_plan(**SEAMS[method]):
            assert_right(inputs, options, upstream, method=method)


def check_scales(device, method, dtype, factor):
    make, yardstick = (make_trained_inputs, "output") if dtype == torch.bfloat16 else (make_inputs, "operands")
    inputs = make(256, 64, 512, dtype, device=device, bias=True)
    with torch.no_grad():
        # a power of two: the same logits
        inputs.weight.div_(factor)
        inputs.bias.div_(factor)
    scale = torch.tensor(factor, device=device, requires_grad=True)
    seams = {name: x for name, x in SEAMS[method].items() if name != "rows" or dtype != torch.float16}
    with forced_plan(**seams):
        # fp16 has normal numbers for gradients of a scaled loss
        assert_right(inputs, {"logit_scale": scale}, torch.tensor(717.0), yardstick=yardstick, method=method)


@pytest.mark.parametrize("factor", [64.0, 1 / 64])
@pytest.mark.parametrize(
    ("method", "dtype"),
    [*((method, dtype) for method in METHODS for dtype in (torch.float32, torch.bfloat16)),
     ("recompute", torch.float16)],
    ids=str,
)  # fmt: skip
def test_large_and_small_scales(run, request, method, dtype, factor) -> None:
    """A factor that one part of a gradient has twice, or not at all, shows."""
    if "interpreter" in request.node.name and dtype != torch.float16:
        pytest.skip("slow, and Triton 3.9's interpreter gets products of transposed bf16 tiles wrong")
    run(check_scales, method, dtype, factor)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("more", [(), ("z_loss",), ("label_smoothing", "class_weight")], ids="-".join)
def test_a_scale_beside_a_bias_of_all_classes(more, method) -> None:
    """What rounded entries of a row sum to, which exact ones do not, meets nothing as large as the bias."""
    inputs = make_inputs(128, 48, 257, torch.bfloat16, bias=-30.0, spread=0.01)
    options = make_options(("logit_scale", *more), inputs)
    assert_right(inputs, options, torch.tensor(0.7), method=method)


def check_planned(device, names):
    """As the planner has it, which never chooses what its method refuses."""
    inputs = spoil_ignored(make_inputs(*TINY, device=device, bias=True, ignored=0.3))
    options = make_options(names, inputs)
    for budget in (None, "min"):
        with forced_plan() as plans:
            loss = loss_of(inputs, memory_budget=budget, **options)
        assert taken(plans[-1].method, names)
        assert plans[-1].method != "fused" or "token_weight" not in names
        assert_loss(loss.detach(), inputs, **options)
        assert_gradients(gradients_of(loss, inputs, options), inputs, **options)


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_as_planned(names) -> None:
    check_planned(torch.device("cpu"), names)


@hypothesis.settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
@hypothesis.given(fuzz.cases())
def test_any_call(case) -> None:
    fuzz.check(torch.device("cpu"), case)


def test_the_reference_is_torch_s_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 7, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 6, IGNORED, 3, 3, IGNORED, 1, 5, 2])
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.3, 1.0):
            for weight in (None, torch.rand(7, generator=generator, dtype=torch.float64)):
                theirs = F.cross_entropy(x, targets, weight, reduction=reduction, label_smoothing=smoothing)
                ours = reference.cross_entropy(
                    x, targets, class_weight=weight, reduction=reduction, label_smoothing=smoothing
                )
                torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)


def check_gradients(function, inputs, options) -> None:
    """By finite differences, of every tensor that asks for gradients."""
    names = [name for name in TRAINABLE if getattr(inputs, name, options.get(name)) is not None]
    given = {**inputs._asdict(), **options}
    names = [name for name in names if isinstance(given[name], torch.Tensor)]

    def of_tensors(*tensors):
        return function(**{**given, **dict(zip(names, tensors, strict=True))})

    # a second backward of "fused" computes in another order
    assert torch.autograd.gradcheck(of_tensors, tuple(given[name] for name in names), nondet_tol=1e-12)


@pytest.mark.parametrize("names", [*SINGLE, *MANY, ("softcap", "logit_scale", "z_loss")], ids="-".join)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_finite_differences(names, reduction) -> None:
    for method in ("recompute", "cached") if reduction == "none" else METHODS:
        if taken(method, names):
            inputs = make_inputs(6, 4, 9, torch.float64, bias=True, ignored=0.3)
            options = make_options(names, inputs, frozen=frozen_by(method))
            if "token_weight" in names:
                # no number to differ from
                options["token_weight"] = options["token_weight"].detach().nan_to_num(1.0)
                options["token_weight"].requires_grad_(method != "fused")
            options = {**options, "reduction": reduction, "method": method}
            frozen = {k: v for k, v in options.items() if method == "fused" and k == "token_weight"}

            def function(frozen=frozen, **given):
                return linear_cross_entropy(**{**given, **frozen})

            shown = {k: v for k, v in options.items() if k not in frozen}
            check_gradients(function, inputs, shown)


NEUTRAL = {
    "token_weight": [None],
    "class_weight": [None],
    "logit_scale": [1.0, 1],
    "softcap": [None],
    "label_smoothing": [0.0, 0],
    "z_loss": [0.0, 0],
}


def check_neutral(device, dtype, method):
    inputs = make_inputs(*TINY, dtype, device=device, bias=True, ignored=0.3)
    for beside in ((), ("softcap",), ("label_smoothing", "class_weight"), ("z_loss", "logit_scale")):
        given = make_options(beside, inputs)
        neutral = {name: value for name, values in NEUTRAL.items() for value in values if name not in beside}
        with forced_plan(**SEAMS[method]):
            plain, same = (loss_of(inputs, method=method, **given, **more) for more in ({}, neutral))
            assert torch.equal(plain, same)
            assert_same_bits(*(gradients_of(loss, inputs, given) for loss in (plain, same)))
    # the loss with numbers that multiply by 1
    one = torch.ones((), device=device)
    plain = loss_of(inputs, reduction="none")
    for factors in (
        {"logit_scale": one}, {"token_weight": one.expand(TINY[0])}, {"class_weight": one.expand(TINY[2])},
    ):  # fmt: skip
        assert torch.equal(loss_of(inputs, reduction="none", **factors), plain), f"{[*factors]} of 1 changes bits"


@pytest.mark.parametrize("method", METHODS)
def test_neutral_values_change_no_bit(run, request, method) -> None:
    if "interpreter" in request.node.name and not request.config.getoption("--slow"):
        pytest.skip("slow: needs --slow")
    run(check_neutral, torch.float32, method)


def test_neutral_values_change_no_bit_in_16_bits() -> None:
    check_neutral(torch.device("cpu"), torch.float16, "recompute")
    check_neutral(torch.device("cpu"), torch.bfloat16, "fused")


@pytest.mark.parametrize("kind", ["strided", "expanded", "zero", "one token", "large"])
@pytest.mark.parametrize("method", ["recompute", "cached"])
def test_upstream_gradients_of_tokens(method, kind) -> None:
    inputs = spoil_ignored(make_inputs(*TINY, bias=True, ignored=0.3))
    options = {**make_options(MANY[2], inputs), "reduction": "none"}
    match kind:
        case "strided":
            upstream = upstream_for((20, 3), "cpu")[:, 1]
        case "expanded":
            upstream = torch.tensor(-0.37).expand(20)
        case "zero":
            upstream = torch.zeros(20)
        case "one token":
            upstream = torch.zeros(20)
            upstream[5] = -2.0
        case "large":
            upstream = upstream_for(20, "cpu") * 1e6
    with forced_plan(**SEAMS[method]):
        assert_right(inputs, options, upstream, method=method)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "logit_scale", "token_weight"])
@pytest.mark.parametrize("method", METHODS)
def test_only_one_tensor_is_trained(method, name) -> None:
    if method == "fused" and name == "token_weight":
        pytest.skip("refused")
    for names in (("logit_scale", "token_weight"), MANY[2]):
        inputs = spoil_ignored(make_inputs(*TINY, bias=True, ignored=0.3))
        options = make_options(names, inputs)
        for other, tensor in {**inputs._asdict(), **options}.items():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.requires_grad_(other == name)
        with forced_plan(**SEAMS[method]):
            assert_right(inputs, options, method=method)


def check_twice(device, method):
    inputs = spoil_ignored(make_inputs(*TINY, device=device, bias=True, ignored=0.3))
    options = make_options(MANY[2], inputs, frozen=frozen_by(method))
    with forced_plan(**SEAMS[method]):
        loss = loss_of(inputs, method=method, **options)
        for factor in (-1.7, 65536.0, 0.0):
            upstream = torch.tensor(factor, device=device)
            gradients = gradients_of(loss, inputs, options, upstream, retain_graph=True)
            assert_gradients(gradients, inputs, upstream, **options)


@pytest.mark.parametrize("method", METHODS)
def test_backward_again(method) -> None:
    check_twice(torch.device("cpu"), method)


@pytest.mark.parametrize("method", METHODS)
def test_double_backward_raises(method) -> None:
    inputs = make_inputs(4, 8, 10, bias=True)
    options = make_options(MANY[2], inputs, frozen=("token_weight",))
    loss = loss_of(inputs, method=method, **options)
    for gradient in gradients_of(loss, inputs, options, create_graph=True):
        if gradient is not None:
            with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
                gradient.norm().backward(retain_graph=True)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_function_transforms_work_or_say_what_fails(transform) -> None:
    inputs = make_inputs(4, 8, 10, torch.float64)
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()

    def function(hidden):
        return linear_cross_entropy(hidden, weight, inputs.targets, softcap=2.5, z_loss=0.02)

    def truth(hidden):
        return reference.linear_cross_entropy(hidden, weight, inputs.targets, softcap=2.5, z_loss=0.02)

    def transformed(function):
        match transform:
            case "grad":
                return torch.func.grad(function)(hidden)
            case "vmap":
                return torch.func.vmap(function)(torch.stack([hidden, 2 * hidden]))
            case "jvp":
                return torch.func.jvp(function, (hidden,), (torch.ones_like(hidden),))[1]

    try:
        found = transformed(function)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        assert "linear_cross_entropy" in str(error), f"{type(error).__name__}: {error}"  # noqa: PT017
    else:
        torch.testing.assert_close(found, transformed(truth))


# kinds of faults


def check_phantom_columns(device, v, softcap, bias, method):
    # a phantom column is one of logit 0, or of -softcap where it was masked too early: either would count
    inputs = make_inputs(5, 8, v, device=device, spread=0.01, bias=bias, seed=v)
    with forced_plan(**SEAMS[method]):
        for names in (("label_smoothing",), ("z_loss",), ()):
            options = make_options(names, inputs) | {"softcap": softcap}
            if taken(method, options):
                assert_right(inputs, options, method=method)


@pytest.mark.parametrize("v", WIDTHS)
@pytest.mark.parametrize(("softcap", "bias"), [(1.0, -30.0), (5.0, -8.0), (30.0, -30.0)])
@pytest.mark.parametrize("method", METHODS)
def test_phantom_columns(v, softcap, bias, method) -> None:
    check_phantom_columns(torch.device("cpu"), v, softcap, bias, method)


@pytest.mark.parametrize("v", [65, 257])
def test_phantom_columns_of_the_kernels(run, v) -> None:
    run(check_phantom_columns, v, 5.0, -8.0, "recompute")


def test_phantom_columns_of_a_large_vocabulary() -> None:
    check_phantom_columns(torch.device("cpu"), 65537, 1.0, -30.0, "recompute")
    check_phantom_columns(torch.device("cpu"), 65537, 5.0, -8.0, "fused")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["recompute", "fused"])
def test_phantom_columns_of_a_large_vocabulary_on_the_gpu(method) -> None:
    check_phantom_columns(torch.device("cuda"), 65537, 1.0, -30.0, method)


def check_far_logits(device, method):
    # exp(-200) is no number of fp32: the logarithm of the softmax is
    inputs = make_inputs(20, 16, 330, device=device, spread=60.0)
    with forced_plan(**SEAMS[method]):
        loss = assert_right(inputs, {"label_smoothing": 0.5}, method=method)
    assert loss > 60


@pytest.mark.parametrize("method", METHODS)
def test_smoothing_of_far_logits(method) -> None:
    check_far_logits(torch.device("cpu"), method)


def check_weight_of_no_class(device, method, ignore_index):
    # class_weight[-100] is the weight of class 500
    inputs = make_inputs(*TINY, device=device, bias=True, ignored=0.3)
    with torch.no_grad():
        inputs.targets[inputs.targets == 500] = 5
        inputs.targets[inputs.targets == IGNORED] = ignore_index
        inputs.hidden[inputs.targets == ignore_index] = math.nan
    options = make_options(("class_weight", "z_loss"), inputs) | {"ignore_index": ignore_index}
    options["class_weight"][500] = math.nan
    with forced_plan(**SEAMS[method]):
        assert_right(inputs, options, method=method)


@pytest.mark.parametrize("ignore_index", [IGNORED, 10**9, 7])
@pytest.mark.parametrize("method", METHODS)
def test_ignored_targets_are_no_class_s(method, ignore_index) -> None:
    check_weight_of_no_class(torch.device("cpu"), method, ignore_index)


def check_nothing_weighs(device, method, what):
    inputs = make_inputs(*TINY, device=device, bias=True, ignored=1.1 if what == "no token" else 0.3)
    if what == "no token":
        spoil_ignored(inputs)
    options = make_options(MANY[1], inputs, frozen=frozen_by(method))
    if what == "tokens weigh nothing":
        options["token_weight"] = torch.zeros(20, device=device, requires_grad=method != "fused")
    if what == "classes weigh nothing":
        options["class_weight"] = torch.zeros(TINY[2], device=device)
    for more in ({}, {"denominator": torch.zeros((), device=device)}, {"denominator": 3.0}):
        if more.get("denominator") == 3.0 and "token_weight" in options:
            # weights of 0 have a gradient there: what the loss would be with others
            options["token_weight"] = options["token_weight"].detach()
        with forced_plan(**SEAMS[method]):
            loss = loss_of(inputs, method=method, **options, **more)
            gradients = gradients_of(loss, inputs, options)
        assert loss == 0
        assert all((gradient == 0).all() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("what", ["no token", "tokens weigh nothing", "classes weigh nothing"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_weighs_anything(method, what) -> None:
    check_nothing_weighs(torch.device("cpu"), method, what)


def check_poison(device, method, value):
    names = MANY[1]
    inputs = spoil_ignored(make_inputs(*TINY, device=device, bias=True, ignored=0.3), value)
    options = make_options(names, inputs, frozen=frozen_by(method))
    with torch.no_grad():
        options["token_weight"][inputs.targets == IGNORED] = value
    with forced_plan(**SEAMS[method]):
        assert_right(inputs, options, method=method)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_what_ignored_tokens_hold(method, value) -> None:
    check_poison(torch.device("cpu"), method, value)


def check_impossible_classes(device, method, names):
    # a tile of -inf from end to end. Under a softcap these are logits of -softcap, as good as any
    inputs = make_inputs(*TINY, device=device, bias=True)
    with torch.no_grad():
        inputs.bias[:300] = -math.inf
        inputs.targets.copy_(300 + inputs.targets % 30)
    options = make_options(names, inputs, frozen=("logit_scale", "token_weight"))
    with forced_plan(**SEAMS[method]):
        assert_right(inputs, options, method=method)


@pytest.mark.parametrize(
    "names", [("z_loss",), ("logit_scale",), ("softcap",), ("class_weight", "token_weight")], ids="-".join
)
@pytest.mark.parametrize("method", METHODS)
def test_impossible_classes(method, names) -> None:
    check_impossible_classes(torch.device("cpu"), method, names)


@pytest.mark.parametrize("method", METHODS)
def test_the_scale_of_impossible_classes_has_a_gradient(method) -> None:
    inputs = make_inputs(*TINY, bias=True)
    with torch.no_grad():
        inputs.bias[300:] = -math.inf
        inputs.targets.remainder_(300)
    options = make_options(("logit_scale",), inputs)
    # without these classes the truth is the same
    possible = Inputs(inputs.hidden, inputs.weight[:300], inputs.targets, inputs.bias[:300])
    with forced_plan(**SEAMS[method]):
        gradients = gradients_of(loss_of(inputs, method=method, **options), inputs, options)
    assert (gradients[1][300:] == 0).all()
    assert_gradients([gradients[0], gradients[1][:300], gradients[2][:300], gradients[3]], possible, **options)


def test_the_smoothed_loss_of_an_impossible_class_is_infinite() -> None:
    inputs = make_inputs(*TINY, bias=True)
    with torch.no_grad():
        inputs.bias[3] = -math.inf
        inputs.targets[inputs.targets == 3] = 4
    assert loss_of(inputs, label_smoothing=0.1) == math.inf


def check_negative_weights(device, method):
    # advantages: of either sign, and their sum may be small
    inputs = make_inputs(*TINY, device=device, bias=True, ignored=0.3)
    weights = torch.randn(20, generator=torch.Generator().manual_seed(3)).to(device)
    for more in ({"reduction": "sum"}, {"denominator": 20}):
        options = {"token_weight": weights.requires_grad_(method != "fused"), "z_loss": 0.02, **more}
        with forced_plan(**SEAMS[method]):
            assert_right(inputs, options, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_negative_weights(method) -> None:
    check_negative_weights(torch.device("cpu"), method)


def check_large_lse(device, dtype):
    # lse is near 100, so that z_loss is most of the loss and of the gradient
    inputs = make_inputs(20, 16, 330, dtype, device=device, bias=95.0)
    assert_right(inputs, {"z_loss": 0.1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_z_loss_of_large_logits(run, dtype) -> None:
    run(check_large_lse, dtype)


def test_z_loss_is_a_mean_of_squares_over_tokens_that_count() -> None:
    inputs = make_inputs(*TINY, bias=True, ignored=0.3)
    x, valid = F.linear(*(x.double() for x in (inputs.hidden, inputs.weight, inputs.bias))), inputs.targets != IGNORED
    expected = F.cross_entropy(x, inputs.targets) + 0.02 * x.logsumexp(-1)[valid].square().mean()
    for method in METHODS:
        loss = loss_of(inputs, z_loss=0.02, method=method)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_no_factor_at_all() -> None:
    inputs = make_inputs(*TINY, bias=True)
    scale = torch.zeros((), requires_grad=True)
    for logit_scale in (0.0, scale, -1.5):
        loss = assert_right(inputs, {"logit_scale": logit_scale})
        if logit_scale != -1.5:
            torch.testing.assert_close(loss, torch.tensor(float(TINY[2])).log())


@pytest.mark.parametrize("names", [*SINGLE, *MANY], ids="-".join)
@pytest.mark.parametrize("method", METHODS)
def test_one_class(method, names) -> None:
    if not taken(method, names):
        pytest.skip("refused")
    inputs = make_inputs(20, 8, 1, bias=True, ignored=0.3)
    options = make_options(names, inputs, frozen=frozen_by(method))
    with torch.no_grad():
        options.get("class_weight", torch.zeros(1)).fill_(0.5)
    loss = loss_of(inputs, method=method, **options)
    assert_loss(loss.detach(), inputs, **options)
    truth = reference.linear_cross_entropy(*inputs[:3], bias=inputs.bias, **options)
    for ours, theirs in zip(gradients_of(loss, inputs, options), gradients_of(truth, inputs, options), strict=True):
        # most are 0, and ours what is left of numbers of about 1
        assert ours is None or (ours - theirs).abs().max() <= 1e-6


def test_everything_is_smoothed() -> None:
    for options in ({"label_smoothing": 1.0}, {"label_smoothing": 1}):
        assert_right(make_inputs(*TINY, bias=True), options)


@pytest.mark.parametrize("kind", ["leading dimensions", "strided", "narrow", "double", "16 bits"])
def test_weights_of_any_layout_and_dtype(kind) -> None:
    inputs = make_inputs(24, 16, 330, bias=True, ignored=0.3)
    options = make_options(("token_weight", "class_weight", "logit_scale"), inputs)
    for name, x in options.items():
        x = x.detach()
        match kind:
            case "strided" if x.dim():
                x = torch.stack([x, torch.full_like(x, math.nan)], 1)[:, 0]
            case "narrow" if x.dim():
                x = torch.full_like(x[:1], 0.5).expand(len(x))
            case "double":
                x = x.double()
            case "16 bits":
                x = x.bfloat16()
        options[name] = x.requires_grad_(name != "class_weight")
    if kind == "leading dimensions":
        inputs = Inputs(
            inputs.hidden.detach().view(2, 3, 4, 16), inputs.weight, inputs.targets.view(2, 3, 4), inputs.bias
        )
        inputs.hidden.requires_grad_()
        options["token_weight"] = options["token_weight"].detach().view(2, 3, 4).requires_grad_()
    for reduction in ("mean", "none"):
        upstream = upstream_for(inputs.targets.shape, "cpu") if reduction == "none" else None
        assert_right(inputs, {**options, "reduction": reduction}, upstream)


def test_integer_options_are_numbers() -> None:
    inputs = make_inputs(*TINY)
    whole = loss_of(inputs, logit_scale=2, softcap=3, z_loss=1)
    assert torch.equal(whole, loss_of(inputs, logit_scale=2.0, softcap=3.0, z_loss=1.0))


def check_autocast(device, dtype):
    inputs = make_inputs(20, 16, 130, dtype, device=device, bias=True, ignored=0.2)
    master = [x.detach().float().requires_grad_() for x in (inputs.hidden, inputs.weight, inputs.bias)]
    options = make_options(OPTIONS, inputs)
    with torch.autocast(device.type, dtype):
        loss = linear_cross_entropy(master[0], master[1], inputs.targets, bias=master[2], **options)
    assert_loss(loss.detach(), inputs, **options)
    gradients = torch.autograd.grad(loss, [*master, options["logit_scale"], options["token_weight"]])
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert_gradients([*(g.to(dtype) for g in gradients[:3]), *gradients[3:]], inputs, **options)


def test_autocast() -> None:
    check_autocast(torch.device("cpu"), torch.float16)


def check_loss_scale(device):
    inputs = make_inputs(40, 48, 200, torch.float16, device=device, ignored=0.2)
    for names, denominator in ((("z_loss",), 4e6), (OPTIONS, 4e6), (("z_loss", "class_weight"), None)):
        # without the scale every entry of dx would be subnormal or zero in fp16
        options = make_options(names, inputs) | ({} if denominator is None else {"denominator": denominator})
        factor = 65536.0 if denominator else 64.0
        loss = loss_of(inputs, **options) * factor
        assert_gradients(gradients_of(loss, inputs, options), inputs, torch.tensor(factor), **options)


def test_fp16_under_a_loss_scale(run) -> None:
    run(check_loss_scale)


def check_inputs_stay(device, method):
    inputs = make_inputs(*TINY, device=device, bias=True, ignored=0.2)
    options = make_options(MANY[1], inputs, frozen=frozen_by(method))
    tensors = [x for x in {**inputs._asdict(), **options}.values() if isinstance(x, torch.Tensor)]
    before = [(x._version, x.detach().clone()) for x in tensors]
    with forced_plan(**SEAMS[method]):
        loss = loss_of(inputs, method=method, **options)
        for _ in range(2):
            gradients_of(loss, inputs, options, retain_graph=True)
    for x, (version, value) in zip(tensors, before, strict=True):
        assert x._version == version
        torch.testing.assert_close(x, value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_stay_as_they_are(method) -> None:
    check_inputs_stay(torch.device("cpu"), method)


@pytest.mark.parametrize("name", ["logit_scale", "class_weight", "token_weight"])
@pytest.mark.parametrize("method", METHODS)
def test_an_option_changed_before_backward_raises_or_does_not_matter(method, name) -> None:
    inputs = make_inputs(*TINY, bias=True)
    options = make_options(OPTIONS[:3], inputs, frozen=frozen_by(method))
    loss = loss_of(inputs, method=method, **options)
    expected = gradients_of(loss, inputs, options, retain_graph=True)
    with torch.no_grad():
        options[name].mul_(2)
    try:
        gradients = gradients_of(loss, inputs, options)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        for one, other in zip(gradients, expected, strict=True):
            assert one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_loss_module_binds_options() -> None:
    inputs = make_inputs(*TINY, ignored=0.2)
    loss = LinearCrossEntropyLoss(label_smoothing=0.1, z_loss=0.02)
    assert_loss(loss(*inputs[:3], softcap=3.0).detach(), inputs, label_smoothing=0.1, z_loss=0.02, softcap=3.0)


# statistics


def assert_statistics(stats: TokenStats, inputs: Inputs, shape=None, **options) -> None:
    """They are the truth's, of logits that may be scaled and capped."""
    wide = torch.promote_types(inputs.hidden.dtype, torch.float32)
    with torch.no_grad():
        valid = inputs.targets != IGNORED
        x = reference._product(inputs.hidden[valid], inputs.weight, inputs.bias, torch.float64)
        scale, softcap = options.get("logit_scale", 1.0), options.get("softcap")
        x = x * (scale.double() if isinstance(scale, torch.Tensor) else scale)
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        log_prob, entropy = reference.log_probs(x, inputs.targets[valid])
    expected = {"lse": x.logsumexp(-1), "log_prob": log_prob, "entropy": entropy}
    for name, value in expected.items():
        found = getattr(stats, name)
        assert found.shape == inputs.targets.shape
        assert found.dtype == wide
        assert not found.requires_grad
        assert (found[~valid] == 0).all()
        error = (found[valid].double() - value).abs() / value.abs().clamp(min=1)
        assert (error <= 1e-5).all(), f"{name} is {error.max():.2e} off"
    assert stats.argmax.dtype == torch.int64
    assert (stats.argmax[~valid] == -1).all()
    best = x.gather(-1, stats.argmax[valid][:, None])[:, 0]
    assert (x.amax(-1) - best <= 1e-5 * x.amax(-1).abs().clamp(min=1)).all()


def check_statistics(device, dtype, method, names):
    inputs = spoil_ignored(make_inputs(*TINY, dtype, device=device, bias=True, ignored=0.3))
    options = make_options(names, inputs, frozen=frozen_by(method))
    with forced_plan(**SEAMS[method]):
        plain = loss_of(inputs, method=method, **options)
        loss, stats = loss_of(inputs, method=method, return_stats=True, **options)
        assert isinstance(stats, TokenStats)
        assert torch.equal(loss, plain)
        assert_same_bits(*(gradients_of(one, inputs, options) for one in (plain, loss)))
    assert_statistics(stats, inputs, **options)
    with torch.no_grad():
        again, alone = loss_of(inputs, return_stats=True, **options)
    assert torch.equal(again, loss)
    assert_same_bits(stats, alone)


@pytest.mark.parametrize("names", [(), *SINGLE, MANY[1]], ids=lambda names: "-".join(names) or "plain")
@pytest.mark.parametrize("method", METHODS)
def test_statistics(run, request, method, names) -> None:
    if "interpreter" in request.node.name and (method, names) not in [("recompute", ("softcap",)), ("fused", ())]:
        pytest.skip("slow: needs --slow")
    run(check_statistics, torch.float32, method, names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_statistics_in_other_dtypes(dtype) -> None:
    check_statistics(torch.device("cpu"), dtype, "recompute", ("softcap", "z_loss"))


def check_argmax(device):
    # every class is there three times: in one tile, in the next, and in the last
    inputs = make_inputs(40, 16, 330, device=device)
    with torch.no_grad():
        # whole numbers, so that equal classes have equal logits wherever they are computed
        inputs.hidden.mul_(4).round_()
        inputs.weight.mul_(16).round_()
        inputs.weight[200:300] = inputs.weight[:100]
        inputs.weight[100:200] = inputs.weight[:100]
        inputs.weight[300:] = 0
        _, stats = loss_of(inputs, return_stats=True)
        x = inputs.hidden.double() @ inputs.weight.double().T
    assert (stats.argmax == x[:, :100].argmax(-1)).all()
    # all equal: the first
    with torch.no_grad():
        inputs.weight.zero_()
        assert (loss_of(inputs, return_stats=True)[1].argmax == 0).all()
        # saturated under a softcap
        inputs.weight[5:] = 100 * inputs.hidden[0]
        assert loss_of(inputs, return_stats=True, softcap=1.0)[1].argmax[0] == 5


def test_the_lowest_of_equal_classes_is_the_largest(run) -> None:
    run(check_argmax)


@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("method", METHODS)
def test_statistics_of_no_token(method, n) -> None:
    inputs = spoil_ignored(make_inputs(n, 8, 70, bias=True, ignored=1.1))
    loss, stats = loss_of(inputs, method=method, return_stats=True)
    assert loss == 0
    assert all(each.shape == (n,) for each in stats)
    assert all((each == 0).all() for each in stats[:3])
    assert (stats.argmax == -1).all()


def test_statistics_of_leading_dimensions() -> None:
    flat = make_inputs(24, 8, 70, ignored=0.3)
    inputs = Inputs(flat.hidden.view(2, 3, 4, 8), flat.weight, flat.targets.view(2, 3, 4), None)
    for reduction in ("mean", "none"):
        loss, stats = loss_of(inputs, reduction=reduction, return_stats=True)
        assert_statistics(stats, inputs)
        assert_loss(loss.detach(), inputs, reduction=reduction)


# what callers get wrong


def _t(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(shape, **options)


_NOT_A_NUMBER = [True, "1", [1.0]]
# (arguments, the error, what it names)
MISTAKES = [
    ({"token_weight": _t(5)}, ValueError, r"token_weight .*\(4,\).*\(5,\)"),
    ({"token_weight": _t(4, 1)}, ValueError, r"token_weight .*\(4,\).*\(4, 1\)"),
    ({"token_weight": _t(4, dtype=torch.int64)}, TypeError, "token_weight .*torch.int64"),
    ({"token_weight": _t(4, dtype=torch.bool)}, TypeError, "token_weight .*torch.bool"),
    ({"token_weight": [1.0] * 4}, TypeError, "token_weight .*list"),
    ({"token_weight": 1.0}, TypeError, "token_weight .*float"),
    ({"token_weight": _t(4, device="meta")}, ValueError, "token_weight is on meta, hidden on cpu"),
    ({"class_weight": _t(9)}, ValueError, r"class_weight .*10.*\(9,\)"),
    ({"class_weight": _t(10, 1)}, ValueError, r"class_weight .*10.*\(10, 1\)"),
    ({"class_weight": _t(10, dtype=torch.int64)}, TypeError, "class_weight .*torch.int64"),
    ({"class_weight": [1.0] * 10}, TypeError, "class_weight .*list"),
    ({"class_weight": _t(10, requires_grad=True)}, ValueError, "class_weight .*grad"),
    ({"class_weight": _t(10, device="meta")}, ValueError, "class_weight is on meta, hidden on cpu"),
    ({"logit_scale": _t(1)}, ValueError, r"logit_scale .*\(1,\)"),
    ({"logit_scale": _t(device="meta")}, ValueError, "logit_scale is on meta, hidden on cpu"),
    ({"logit_scale": _t(dtype=torch.int64)}, TypeError, "logit_scale .*torch.int64"),
    ({"logit_scale": math.nan}, ValueError, "logit_scale .*nan"),
    ({"logit_scale": math.inf}, ValueError, "logit_scale .*inf"),
    ({"logit_scale": None}, TypeError, "logit_scale .*NoneType"),
    ({"softcap": 0.0}, ValueError, "softcap .*0"),
    ({"softcap": -1.0}, ValueError, "softcap .*-1"),
    ({"softcap": math.nan}, ValueError, "softcap .*nan"),
    ({"softcap": _t()}, TypeError, "softcap .*Tensor"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing .*-0.1"),
    ({"label_smoothing": 1.1}, ValueError, "label_smoothing .*1.1"),
    ({"label_smoothing": math.nan}, ValueError, "label_smoothing .*nan"),
    ({"label_smoothing": None}, TypeError, "label_smoothing .*NoneType"),
    ({"z_loss": -1e-4}, ValueError, "z_loss .*-0.0001"),
    ({"z_loss": math.nan}, ValueError, "z_loss .*nan"),
    ({"z_loss": math.inf}, ValueError, "z_loss .*inf"),
    ({"z_loss": None}, TypeError, "z_loss .*NoneType"),
    ({"method": "fused", "token_weight": _t(4, requires_grad=True)}, ValueError, "fused.*token_weight"),
    *(
        (
            {"method": method, "softcap": 1.0, "label_smoothing": 0.1},
            ValueError,
            f"{method}.*softcap.*label_smoothing",
        )
        for method in ("cached", "fused")
    ),
    *(
        ({name: value}, TypeError, f"{name} .*{type(value).__name__}")
        for name in ("logit_scale", "softcap", "label_smoothing", "z_loss")
        for value in _NOT_A_NUMBER
    ),
]


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=lambda m: ", ".join(f"{k}={v!r}".replace("\n", "") for k, v in m[0].items())
)
def test_mistakes(mistake) -> None:
    changes, error, message = mistake
    good = {"hidden": _t(4, 8, requires_grad=True), "weight": _t(10, 8), "targets": _t(4, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**good, **changes})
