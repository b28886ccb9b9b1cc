"""Distillation between two heads: against whole logits in fp64, on one device and over groups of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import assert_same_bits, gathered
from tolerance import LOSS, assert_gradient
from torch.utils._python_dispatch import TorchDispatchMode

from cce_dist import VocabShard, linear_kl_div
from cce_dist.kernels import runtime

DIVERGENCES = ["forward", "reverse", "jensen_shannon"]
NAMES = ("student_hidden", "student_weight", "student_bias")


class Case(NamedTuple):
    student: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    teacher: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    mask: torch.Tensor | None
    top_k: tuple[torch.Tensor, torch.Tensor] | None = None


def make_case(
    n: int | tuple[int, ...],
    v: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    widths: tuple[int, int] = (24, 40),
    teacher_dtype: torch.dtype | None = None,
    bias: bool = False,
    masked: float = 0.0,
    spread: float = 2.0,
    top_k: int = 0,
    seed: int = 0,
) -> Case:
    """A student's leaves, which ask for gradients, and a teacher that agrees with it in part. ``spread`` is the
    standard deviation of the logits."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n,) if isinstance(n, int) else n

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def head(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return normal(*shape, width), normal(v, width) * (spread / width**0.5), normal(v) if bias else None

    student, teacher = head(widths[0]), head(widths[1])
    shared = min(widths) // 2
    teacher[0][..., :shared] = student[0][..., :shared]
    teacher[1][:, :shared] = student[1][:, :shared] * (widths[0] / widths[1]) ** 0.5
    mask = torch.rand(shape, generator=generator) >= masked if masked else None
    chosen = None
    if top_k:
        probs, ids = (teacher[0] @ teacher[1].T).softmax(-1).topk(top_k)
        chosen = ids.to(device), probs.float().to(device)
    return Case(
        tuple(None if x is None else x.to(device, dtype).requires_grad_() for x in student),
        tuple(None if x is None else x.to(device, teacher_dtype or dtype) for x in teacher),
        None if mask is None else mask.to(device),
        chosen,
    )


def loss_of(case: Case, **options: Any) -> torch.Tensor:
    (hidden, weight, bias), mask = case.student, case.mask
    if case.top_k is not None:
        return linear_kl_div(hidden, weight, top_k=case.top_k, student_bias=bias, mask=mask, **options)
    return linear_kl_div(
        hidden, weight, *case.teacher[:2], student_bias=bias, teacher_bias=case.teacher[2], mask=mask, **options
    )


def logits_of(head: tuple[torch.Tensor | None, ...], softcap: float | None, temperature: float) -> torch.Tensor:
    hidden, weight, bias = head
    x = hidden @ weight.T
    x = x if bias is None else x + bias
    return (x if softcap is None else softcap * torch.tanh(x / softcap)) / temperature


def whole_losses(
    student: torch.Tensor, case: Case, dtype: torch.dtype, divergence="forward", beta=0.5, temperature=1.0,
    teacher_softcap=None,
) -> torch.Tensor:  # fmt: skip
    """Each token's loss from the student's whole logits."""
    log_q = student.log_softmax(-1)
    if case.top_k is not None:
        ids, probs = case.top_k
        probs = probs.to(dtype)
        return (torch.xlogy(probs, probs) - probs * log_q.gather(-1, ids.long())).sum(-1)
    teacher = tuple(None if x is None else x.to(dtype) for x in case.teacher)
    log_p = logits_of(teacher, teacher_softcap, temperature).log_softmax(-1)
    if divergence == "jensen_shannon":
        # over whole distributions rather than their logarithms
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        terms = beta * F.kl_div(log_m, log_p, reduction="none", log_target=True)
        return (terms + (1 - beta) * F.kl_div(log_m, log_q, reduction="none", log_target=True)).sum(-1)
    first, second = (log_q, log_p) if divergence == "forward" else (log_p, log_q)
    return F.kl_div(first, second, reduction="none", log_target=True).sum(-1)


def reference(
    case: Case, dtype: torch.dtype, upstream: torch.Tensor | None = None, *, operands: torch.dtype | None = None,
    reduction="mean", denominator=None, student_softcap=None, **options: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """(loss, gradients of the student) on whole logits in ``dtype``; with ``operands`` the gradient of the logits
    before the softcap is rounded to it once, for fp16 in units of a power of two."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in case.student]
    mask = torch.ones(leaves[0].shape[:-1], dtype=torch.bool) if case.mask is None else case.mask
    mask = mask.to(leaves[0].device)
    hidden, weight, bias = leaves
    # what does not count takes no part, whatever it holds
    clean = torch.where(mask[..., None], hidden, 0)
    product = clean @ weight.T
    x = product if bias is None else product + bias
    temperature = options.get("temperature", 1.0)
    x = (x if student_softcap is None else student_softcap * torch.tanh(x / student_softcap)) / temperature
    teacher = (torch.where(mask[..., None], case.teacher[0], 0), *case.teacher[1:])
    losses = torch.where(mask, whole_losses(x, case._replace(teacher=teacher), dtype, **options), 0)
    if reduction == "none":
        loss = losses
    else:
        loss = losses.sum()
        if reduction == "mean":
            loss = loss / (mask.sum().clamp(min=1) if denominator is None else denominator)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(dtype)
    present = [leaf for leaf in leaves if leaf is not None]
    if operands is None:
        return loss.detach(), list(torch.autograd.grad(loss, present, upstream))
    dx = torch.autograd.grad(loss, product, upstream)[0].flatten(0, -2)
    unit = 2.0 ** (torch.frexp(dx.abs().max()).exponent.item() - 14) if operands == torch.float16 else 1.0
    rounded = (dx / unit).to(operands).to(dtype) * unit
    d_hidden = (rounded @ weight.detach()).view_as(hidden)
    return loss.detach(), [d_hidden, rounded.T @ clean.detach().flatten(0, -2), dx.sum(0)][: len(present)]


def assert_case(
    case: Case,
    loss: torch.Tensor,
    gradients: list[torch.Tensor],
    upstream: torch.Tensor | None = None,
    **options: Any,
) -> None:
    truth, expected = reference(case, torch.float64, upstream, **options)
    dtype = case.student[0].dtype
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.shape == truth.shape
    error = (loss.double() - truth).abs() / truth.abs().clamp(min=1)
    bound = LOSS if dtype != torch.float64 else 1e-12
    assert bool((error <= bound).all()), f"the loss is {error.max():.2e} off"
    yardsticks = [reference(case, torch.float32, upstream, **options)[1]]
    if dtype in (torch.bfloat16, torch.float16):
        yardsticks.append(reference(case, torch.float32, upstream, operands=dtype, **options)[1])
    largest = float(
        logits_of([None if x is None else x.detach().double() for x in case.student], None, 1).abs().max()
    )
    assert len(gradients) == len(expected)
    for index, gradient in enumerate(gradients):
        assert gradient.dtype == dtype
        yards = [yard[index] for yard in yardsticks]
        assert_gradient(gradient, expected[index], yards, NAMES[index], largest_logit=largest)


def assert_right(case: Case, **options: Any) -> torch.Tensor:
    """The loss, when it and its gradients are those of whole logits."""
    loss = loss_of(case, **options)
    upstream = make_upstream(loss)
    leaves = [x for x in case.student if x is not None]
    gradients = torch.autograd.grad(loss, leaves, upstream)
    truth = {k: x for k, x in options.items() if k != "memory_budget"}
    assert_case(case, loss.detach(), list(gradients), upstream, **truth)
    return loss.detach()


def make_upstream(loss: torch.Tensor) -> torch.Tensor | None:
    if loss.dim() == 0:
        return None
    return torch.rand(loss.shape, generator=torch.Generator().manual_seed(1)).to(loss.device, loss.dtype)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """For what the interpreter would take minutes for."""
    return torch.device(request.param)


@contextmanager
def small_panels(rows: int = 32, columns: int = 64) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cce_dist.distillation.PANEL_ROWS", (rows,))
        patch.setattr("cce_dist.distillation.PANEL_COLUMNS", (columns, columns))
        yield


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_option_in_double_precision(divergence, reduction) -> None:
    for masked in (0.0, 0.4):
        for bias in (False, True):
            case = make_case((3, 11), 301, torch.float64, bias=bias, masked=masked)
            for options in (
                {},
                {"temperature": 2.5},
                {"student_softcap": 3.0, "temperature": 0.5},
                {"student_softcap": 4.0, "teacher_softcap": 2.0, "beta": 0.1},
            ):
                with small_panels(16, 128):
                    assert_right(case, divergence=divergence, reduction=reduction, **options)


def test_denominator() -> None:
    case = make_case(20, 90, masked=0.3)
    for denominator in (7, 300.5, torch.tensor(40)):
        assert_right(case, denominator=denominator)


@pytest.mark.parametrize("kind", [*DIVERGENCES, "top_k"])
def test_gradcheck(kind) -> None:
    case = make_case(5, 21, torch.float64, widths=(4, 3), bias=True, masked=0.3, top_k=4 if kind == "top_k" else 0)

    def function(*student: torch.Tensor) -> torch.Tensor:
        divergence = "forward" if kind == "top_k" else kind
        return loss_of(
            case._replace(student=student), divergence=divergence, beta=0.3, temperature=1.5, reduction="none",
            student_softcap=2.0,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, case.student)


def check_accuracy(device, dtype, divergence, spread):
    case = make_case((2, 75), 701, dtype, device=device, bias=True, masked=0.2, spread=spread)
    with small_panels(64, 256):
        assert_right(case, divergence=divergence, beta=0.3, temperature=1.3)
        assert_right(case, divergence=divergence, reduction="none", student_softcap=9.0, teacher_softcap=5.0)


@pytest.mark.parametrize("spread", [0.5, 5.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accuracy(device, dtype, divergence, spread) -> None:
    check_accuracy(device, dtype, divergence, spread)


def check_kernels(device, dtype, kind):
    # two panels of columns, the second ragged, and of rows, the second without a token in part
    case = make_case(37, 150, dtype, device=device, bias=True, masked=0.3, top_k=5 if kind == "top_k" else 0)
    options = {} if kind == "top_k" else {"divergence": kind, "beta": 0.3, "teacher_softcap": 5.0}
    with small_panels(32, 128):
        assert_right(case, reduction="none", temperature=1.3, student_softcap=3.0, **options)


@pytest.mark.parametrize("kind", [*DIVERGENCES, "top_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels(run, dtype, kind) -> None:
    """float16 stands for both 16-bit dtypes: the interpreter has no bfloat16."""
    run(check_kernels, dtype, kind)


def check_mixed_dtypes(device):
    for student, teacher in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        case = make_case(40, 300, student, teacher_dtype=teacher, device=device, bias=True)
        assert_right(case, divergence="jensen_shannon")


def test_heads_of_different_dtypes(device) -> None:
    check_mixed_dtypes(device)


def check_top_k(device, dtype):
    case = make_case((2, 40), 501, dtype, device=device, bias=True, masked=0.2, top_k=7)
    ids, probs = case.top_k
    with torch.no_grad():
        # a class twice, and one that weighs nothing
        ids[..., 3] = ids[..., 1]
        probs[..., 5] = 0
        # probabilities that sum to more than 1
        probs[0] *= 3
    with small_panels(32, 128):
        assert_right(case, temperature=1.4, student_softcap=6.0)
        assert_right(case._replace(top_k=(ids.int(), probs)), reduction="none")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_top_k(device, dtype) -> None:
    check_top_k(device, dtype)


def test_top_k_of_all_classes_is_the_whole_divergence() -> None:
    case = make_case(12, 60, torch.float64)
    probs, ids = (case.teacher[0] @ case.teacher[1].T).softmax(-1).topk(60)
    whole = loss_of(case)
    torch.testing.assert_close(loss_of(case._replace(top_k=(ids, probs))), whole, rtol=1e-12, atol=0)


@pytest.mark.gpu
def test_top_k_outside_the_vocabulary_on_the_gpu() -> None:
    case = make_case(10, 100, device="cuda", top_k=4)
    whole = loss_of(case, reduction="none")
    case.top_k[0][4, 2] = 100
    loss = loss_of(case, reduction="none")
    rest = torch.arange(10, device="cuda") != 4
    assert loss[4].isnan()
    assert torch.equal(loss[rest], whole[rest])


def check_identical(device, dtype, divergence):
    case = make_case(40, 700, dtype, device=device, spread=6.0, bias=True)
    case = case._replace(teacher=tuple(x.detach().clone() for x in case.student))
    with small_panels(32, 256):
        loss = loss_of(case, divergence=divergence, reduction="none")
    assert ((loss >= -1e-6) & (loss < 1e-6)).all()
    loss.sum().backward()
    for x in case.student:
        # of the gradient p alone the norm is far above 1
        assert x.grad.norm() < 1e-4


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_identical_heads(device, divergence) -> None:
    check_identical(device, torch.float32, divergence)
    check_identical(device, torch.bfloat16, divergence)


def check_masked(device, divergence, value):
    options = {"divergence": divergence} if divergence != "top_k" else {}
    n, v = (17, 50) if runtime.INTERPRETED else (50, 300)
    case = make_case(n, v, device=device, masked=0.4, bias=True, top_k=5 if divergence == "top_k" else 0)
    clean = loss_of(case, **options)
    gradients = torch.autograd.grad(clean, case.student)
    with torch.no_grad():
        for hidden in (case.student[0], case.teacher[0]):
            hidden[~case.mask] = value
        if case.top_k is not None:
            case.top_k[0][~case.mask] = -1
            case.top_k[1][~case.mask] = value
    loss = loss_of(case, **options)
    again = torch.autograd.grad(loss, case.student)
    assert torch.equal(loss, clean)
    assert all(torch.equal(x, y) for x, y in zip(again, gradients, strict=True))
    assert (again[0][~case.mask] == 0).all()
    assert (loss_of(case, reduction="none", **options)[~case.mask] == 0).all()


@pytest.mark.parametrize(
    ("divergence", "value"), [(kind, math.nan) for kind in [*DIVERGENCES, "top_k"]] + [("forward", math.inf)]
)
def test_masked_tokens_take_no_part(run, divergence, value) -> None:
    run(check_masked, divergence, value)


def check_nothing_counts(device, shape):
    for divergence in DIVERGENCES:
        case = make_case(shape, 90, torch.bfloat16, device=device, bias=True)
        case = case._replace(mask=torch.zeros(shape, dtype=torch.bool, device=device))
        for options in ({}, {"reduction": "sum"}, {"denominator": 5}):
            loss = loss_of(case, divergence=divergence, **options)
            assert loss == 0
            for gradient, x in zip(torch.autograd.grad(loss, case.student), case.student, strict=True):
                assert gradient.shape == x.shape
                assert (gradient == 0).all()
        assert loss_of(case, divergence=divergence, reduction="none").shape == shape


@pytest.mark.parametrize("shape", [(6,), (0,), (2, 0)], ids=str)
def test_no_token_counts(device, shape) -> None:
    check_nothing_counts(device, shape)


def test_nothing_is_computed_for_masked_tokens() -> None:
    case = make_case(320, 300)
    case = case._replace(mask=torch.arange(320) < 5)
    with Sizes() as sizes:
        loss_of(case).backward()
    # rows of the products, of logits and of gradients
    assert 0 < sizes.largest_rows <= 5


def check_minus_infinity(device):
    v = 100 if runtime.INTERPRETED else 600
    # panels of -inf from end to end, the first among them; and a class that the teacher alone rules out
    for divergence in DIVERGENCES:
        case = make_case(20, v, device=device, bias=True)
        kept = torch.arange(v, device=device) >= v // 2
        with torch.no_grad():
            case.student[2][: v // 2] = -math.inf
            case.teacher[2][: v // 2] = -math.inf
        with small_panels(32, 64):
            loss = loss_of(case, divergence=divergence)
        gradients = torch.autograd.grad(loss, case.student)
        student = tuple(x.detach() if x.dim() == 2 and len(x) == 20 else x.detach()[kept] for x in case.student)
        teacher = tuple(x if x.dim() == 2 and len(x) == 20 else x[kept] for x in case.teacher)
        parts = [gradients[0], *(x[kept] for x in gradients[1:])]
        assert_case(Case(student, teacher, None), loss.detach(), parts, divergence=divergence)
        assert all((x[~kept] == 0).all() for x in gradients[1:])
    case = make_case(20, v, device=device, bias=True)
    case.teacher[2][77] = -math.inf
    assert loss_of(case).isfinite()
    assert loss_of(case, divergence="jensen_shannon").isfinite()
    assert loss_of(case, divergence="reverse") == math.inf


def check_vanished_infinity(device):
    # the student rules out a class that has weight in the teacher's first panel, and none beside the later ones
    case = make_case(20, 100, device=device, bias=True)
    with torch.no_grad():
        case.student[2][0] = -math.inf
    case.teacher[2][:64] = -500.0
    with small_panels(32, 64):
        assert loss_of(case).isfinite()


def test_an_infinite_term_that_weighs_nothing(run) -> None:
    run(check_vanished_infinity)


def check_poisoned_shards(group, device):
    """A NaN, or an infinite logit, among one rank's classes is every rank's."""
    shard = VocabShard.even(90, group)
    for kind in DIVERGENCES:
        for value in (math.nan, math.inf):
            case = local_case(make_case(8, 90, device=device, bias=True), shard)
            if dist.get_rank(group) == 0:
                case.teacher[2][3] = value
            loss = loss_of(case, shard=shard, divergence=kind, reduction="none")
            assert loss.isnan().all()


def test_nan_of_one_rank(ranks) -> None:
    ranks.run(check_poisoned_shards, ranks=2)


def test_classes_of_minus_infinity(run) -> None:
    run(check_minus_infinity)


def check_far_logits(device):
    # softmaxes whose ends underflow: their logarithms still count
    for divergence, scale in (("forward", 30.0), ("reverse", 30.0), ("jensen_shannon", 30.0)):
        case = make_case(20, 300, torch.float64, device=device, spread=scale)
        case = Case(
            tuple(None if x is None else x.detach().float().requires_grad_() for x in case.student),
            tuple(None if x is None else x.float() for x in case.teacher),
            None,
        )
        assert loss_of(case, divergence=divergence) > 0.1
        with small_panels(32, 64):
            loss = loss_of(case, divergence=divergence, reduction="none")
        truth = reference(case, torch.float64, divergence=divergence, reduction="none")[0].nan_to_num()
        torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss.sum(), case.student[:2]))


def test_logits_that_are_far_apart(device) -> None:
    check_far_logits(device)


def check_poisoned(device, value, whose):
    for divergence in DIVERGENCES[1:] if runtime.INTERPRETED else DIVERGENCES:
        case = make_case(20, 70 if runtime.INTERPRETED else 300, device=device)
        with torch.no_grad():
            (case.student if whose == "student" else case.teacher)[0][3] = value
        loss = loss_of(case, divergence=divergence, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), case.student[:1])
        rest = torch.arange(20, device=device) != 3
        assert loss[3].isnan()
        assert gradient[3].isnan().any()
        assert loss[rest].isfinite().all()
        assert gradient[rest].isfinite().all()


@pytest.mark.parametrize("whose", ["student", "teacher"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_its_own_token_s(run, value, whose) -> None:
    run(check_poisoned, value, whose)


def check_loss_scale(device, divergence):
    case = make_case(40, 300, torch.float16, device=device, top_k=6 if divergence == "top_k" else 0)
    options = {} if divergence == "top_k" else {"divergence": divergence}
    # a denominator as of a large job: without the scale every entry would be subnormal or zero in fp16
    loss = loss_of(case, denominator=4e6, **options)
    gradients = torch.autograd.grad(loss * 65536.0, case.student[:2])
    upstream = torch.tensor(65536.0, device=device)
    assert_case(case, loss.detach(), list(gradients), upstream, denominator=4e6, **options)


@pytest.mark.parametrize("divergence", [*DIVERGENCES, "top_k"])
def test_fp16_under_a_loss_scale(device, divergence) -> None:
    check_loss_scale(device, divergence)


def test_fp16_panels_hold_large_log_ratios() -> None:
    # log(q / p) of 100 and more: q log(q / p) is far above the upstream gradient
    case = make_case(40, 300, torch.float16, spread=1.0)
    with torch.no_grad():
        case.teacher[1].mul_(60)
    loss = loss_of(case, divergence="reverse")
    assert loss > 50
    gradients = torch.autograd.grad(loss * 1024, case.student[:2])
    upstream = torch.tensor(1024.0)
    assert_case(case, loss.detach(), list(gradients), upstream, divergence="reverse")


def check_repeatable(device, divergence):
    results = []
    for _ in range(3):
        case = make_case(65, 700, torch.bfloat16, device=device, bias=True, masked=0.1, top_k=9)
        options = {}
        if divergence != "top_k":
            case, options = case._replace(top_k=None), {"divergence": divergence}
        with small_panels(32, 256):
            loss = loss_of(case, **options)
        first = torch.autograd.grad(loss, case.student, retain_graph=True)
        second = torch.autograd.grad(loss, case.student)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        results.append([loss, *first])
    assert all(torch.equal(x, y) for again in results[1:] for x, y in zip(results[0], again, strict=True))


@pytest.mark.parametrize("divergence", [*DIVERGENCES, "top_k"])
def test_runs_repeat_bit_for_bit(device, divergence) -> None:
    check_repeatable(device, divergence)


def test_no_second_derivative() -> None:
    case = make_case(5, 20)
    (gradient,) = torch.autograd.grad(loss_of(case), case.student[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_kl_div has no second derivative"):
        gradient.square().sum().backward()


class Sizes(TorchDispatchMode):
    """Notes the largest tensor that anything returns, the products, and the most rows of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.largest_rows = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm):
            self.products += 1
            right = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.largest_rows = max(self.largest_rows, min(right[0].shape))
        return result


@pytest.mark.parametrize(("trained", "products"), [((), 2), ((0,), 5), ((1,), 5), ((2,), 4), ((0, 1, 2), 6)], ids=str)
def test_frozen_tensors_get_no_gradient(trained, products) -> None:
    case = make_case(20, 130, bias=True)
    for index, tensor in enumerate(case.student):
        tensor.requires_grad_(index in trained)
    with Sizes() as sizes:
        loss = loss_of(case)
        assert loss.requires_grad == bool(trained)
        if trained:
            loss.backward()
    assert sizes.products == products
    assert [x.grad is not None for x in case.student] == [index in trained for index in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*DIVERGENCES, "top_k"])
def test_logits_are_never_whole(kind, dtype) -> None:
    n, v = 512, 6000
    case = make_case(n, v, dtype, widths=(16, 24), top_k=3 if kind == "top_k" else 0)
    options = {} if kind == "top_k" else {"divergence": kind}
    with Sizes() as sizes:
        loss_of(case, memory_budget="min", **options).backward()
    assert 0 < sizes.largest < n * v / 8
    with Sizes() as sizes:
        reference(case, torch.float32, **options)
    assert sizes.largest >= n * v


def test_budgets() -> None:
    case = make_case(3000, 2000, torch.bfloat16, widths=(16, 24))
    with pytest.raises(ValueError, match=r"memory_budget: nothing fits 1000 bytes of workspace; (\d+) are") as told:
        loss_of(case, memory_budget=1000)
    least = int(re.search(r"(\d+) are", str(told.value))[1])
    assert_right(case, memory_budget=least)
    with pytest.raises(ValueError, match="nothing fits"):
        loss_of(case, memory_budget=least - 1)


def test_autocast_casts_as_linear_does() -> None:
    case = make_case(20, 130, torch.bfloat16, bias=True)
    master = [x.detach().float().requires_grad_() for x in case.student]
    teacher = [x.float() for x in case.teacher]
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(Case(tuple(master), tuple(teacher), None))
    loss.backward()
    assert all(x.grad.dtype == torch.float32 for x in master)
    assert_case(case, loss.detach(), [x.grad.bfloat16() for x in master])


def check_strides(device):
    case = make_case((4, 6), 130, device=device, bias=True, masked=0.2)
    hidden = case.student[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = case.student[1].detach().T.contiguous().T.requires_grad_()
    bias = torch.stack([case.student[2].detach()] * 2, 1)[:, 0].requires_grad_()
    teacher = (torch.cat([case.teacher[0]] * 2, -1)[..., :40], case.teacher[1].T.contiguous().T, case.teacher[2])
    assert_right(Case((hidden, weight, bias), teacher, case.mask))


def test_strides(device) -> None:
    check_strides(device)


def shard_of(layout: str, vocab_size: int, group: dist.ProcessGroup) -> VocabShard:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if layout == "even":
        return VocabShard.even(vocab_size, group)
    if layout == "padded":
        return VocabShard.padded(vocab_size, 64, group)
    first = [1 + 7 * r for r in range(size - 1)] if layout == "uneven" else [0] * (size - 1)
    bounds = [0, *first, vocab_size]
    return VocabShard(bounds[rank], bounds[rank + 1], vocab_size, group)


def local_case(case: Case, shard: VocabShard) -> Case:
    """This rank's rows, new leaves; NaN in the rows of padding."""

    def rows(whole):
        part = whole.new_full((shard.rows, *whole.shape[1:]), math.nan)
        part[: shard.classes] = whole.detach()[shard.start : shard.start + shard.classes]
        return part

    student, teacher = ((head[0].detach().clone(), *map(rows, head[1:])) for head in (case.student, case.teacher))
    return case._replace(student=tuple(x.requires_grad_() for x in student), teacher=teacher)


def check_sharded(group, device, layout, dtype, kind, options):
    case = make_case((3, 15), 301, dtype, device=device, bias=True, masked=0.3, top_k=6 if kind == "top_k" else 0)
    options = {**options, **({} if kind == "top_k" else {"divergence": kind})}
    shard = shard_of(layout, 301, group)
    local = local_case(case, shard)
    with small_panels(32, 64):
        loss = loss_of(local, shard=shard, **options)
    upstream = make_upstream(loss)
    loss.backward(upstream)
    assert_same_bits(loss, group)
    assert_same_bits(local.student[0].grad, group)
    gradients = [local.student[0].grad]
    for x in local.student[1:]:
        assert (x.grad[shard.classes :] == 0).all(), "padding has a gradient"
        gradients.append(gathered(x.grad[: shard.classes], 0, group))
    assert_case(case, loss.detach(), gradients, upstream, **options)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [*DIVERGENCES, "top_k"])
@pytest.mark.parametrize("layout", ["even", "padded", "uneven", "empty first"])
def test_sharded(ranks, layout, kind, size) -> None:
    options = {"temperature": 1.5, "student_softcap": 8.0, "reduction": "none"}
    ranks.run(check_sharded, layout, torch.float32, kind, options, ranks=size)


@pytest.mark.parametrize("kind", [*DIVERGENCES, "top_k"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_sharded_dtypes(ranks, dtype, kind) -> None:
    ranks.run(check_sharded, "padded", dtype, kind, {}, ranks=3)


def check_sharded_edges(group, device):
    shard = shard_of("empty first", 90, group)
    for kind in DIVERGENCES:
        for shape, mask in ((8, False), (0, None)):
            case = local_case(make_case(shape, 90, device=device, bias=True), shard)
            if mask is not None:
                case = case._replace(mask=torch.zeros(shape, dtype=torch.bool, device=device))
            loss = loss_of(case, shard=shard, divergence=kind)
            loss.backward()
            assert loss == 0
            assert all((x.grad == 0).all() for x in case.student)
        # a rank whose weight is frozen
        case = local_case(make_case(8, 90, device=device, bias=True), shard)
        case.student[1].requires_grad_(dist.get_rank(group) != 0)
        loss_of(case, shard=shard, divergence=kind).backward()
        assert (case.student[1].grad is None) == (dist.get_rank(group) == 0)
        assert_same_bits(case.student[0].grad, group)


def test_sharded_edges(ranks) -> None:
    ranks.run(check_sharded_edges, ranks=2)


def _t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


_TOP = {"teacher_hidden": None, "teacher_weight": None}
_IDS, _PROBS = torch.zeros(4, 3, dtype=torch.int64), torch.full((4, 3), 0.3)
# name -> (arguments that replace good ones, the error, what it says)
MISTAKES = {
    "hidden is no tensor": ({"student_hidden": [1.0]}, TypeError, "student_hidden must be a tensor, got list"),
    "weight is no tensor": ({"student_weight": None}, TypeError, "student_weight must be a tensor, got NoneType"),
    "teacher is no tensor": ({"teacher_weight": 3}, TypeError, "teacher_weight must be a tensor, got int"),
    "hidden is a scalar": ({"student_hidden": _t()}, ValueError, "student_hidden must have the shape [..., D]"),
    "flat weight": ({"student_weight": _t(80)}, ValueError, "student_weight must have the shape [V, 8]"),
    "teacher's weight of another width": (
        {"teacher_weight": _t(10, 5)},
        ValueError,
        "teacher_weight must have the shape [V, 6] for teacher_hidden (4, 6), got (10, 5)",
    ),
    "another vocabulary": (
        {"teacher_weight": _t(11, 6)},
        ValueError,
        "teacher_weight must hold the 10 classes of student_weight, got 11 rows",
    ),
    "other tokens": (
        {"teacher_hidden": _t(5, 6)},
        ValueError,
        "teacher_hidden must have the shape (4,) of student_hidden before its last dimension, got (5, 6)",
    ),
    "teacher's hidden alone": ({"teacher_weight": None}, ValueError, "teacher_weight is missing"),
    "no teacher": (_TOP, ValueError, "pass either teacher_hidden and teacher_weight or top_k, got neither"),
    "two teachers": ({"top_k": (_IDS, _PROBS)}, ValueError, "or top_k, got both"),
    "teacher that learns": (
        {"teacher_hidden": _t(4, 6).requires_grad_()},
        ValueError,
        "teacher_hidden requires gradients, of which a teacher gets none: pass .detach()",
    ),
    "teacher's weight that learns": (
        {"teacher_weight": _t(10, 6).requires_grad_()},
        ValueError,
        "teacher_weight requires gradients",
    ),
    "teacher's bias that learns": (
        {"teacher_bias": _t(10).requires_grad_()},
        ValueError,
        "teacher_bias requires gradients",
    ),
    "probabilities that learn": (
        {**_TOP, "top_k": (_IDS, _PROBS.clone().requires_grad_())},
        ValueError,
        "the probabilities of top_k requires gradients",
    ),
    "top_k in reverse": (
        {**_TOP, "top_k": (_IDS, _PROBS), "divergence": "reverse"},
        ValueError,
        "top_k serves divergence \"forward\" alone, got 'reverse'",
    ),
    "top_k is ids alone": ({**_TOP, "top_k": _IDS}, TypeError, "top_k must be a pair of tensors"),
    "top_k of other tokens": (
        {**_TOP, "top_k": (_IDS[:3], _PROBS)},
        ValueError,
        "the ids of top_k must have the shape [*(4,), K] of the tokens, got (3, 3)",
    ),
    "ids that are numbers": (
        {**_TOP, "top_k": (_PROBS, _PROBS)},
        TypeError,
        "the ids of top_k must be int64 or int32, got torch.float32",
    ),
    "id past the end": ({**_TOP, "top_k": (_IDS + 20, _PROBS)}, IndexError, "the ids of top_k must lie in [0, "),
    "mask of numbers": ({"mask": _t(4)}, TypeError, "mask must be a bool tensor, got torch.float32"),
    "mask of other tokens": (
        {"mask": _t(5, dtype=torch.bool)},
        ValueError,
        "mask must have the shape (4,) of the tokens, got (5,)",
    ),
    "unknown divergence": (
        {"divergence": "kl"},
        ValueError,
        "divergence must be one of 'forward', 'reverse', 'jensen_shannon', got 'kl'",
    ),
    "beta of 1": ({"beta": 1.0}, ValueError, "beta must lie between 0 and 1, got 1.0"),
    "beta of 0": ({"beta": 0.0}, ValueError, "beta must be above 0 and finite, got 0.0"),
    "temperature of 0": ({"temperature": 0}, ValueError, "temperature must be above 0 and finite, got 0"),
    "temperature is a tensor": ({"temperature": _t()}, TypeError, "temperature must be a number, got Tensor"),
    "negative softcap": (
        {"teacher_softcap": -1.0},
        ValueError,
        "teacher_softcap must be above 0 and finite, got -1.0",
    ),
    "unknown reduction": ({"reduction": "batchmean"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'"),
    "denominator of a sum": (
        {"reduction": "sum", "denominator": 3},
        ValueError,
        "denominator takes part in reduction 'mean' alone, got reduction 'sum'",
    ),
    "denominator of zero": ({"denominator": 0}, ValueError, "denominator must be above 0, got 0"),
    "budget is a word": (
        {"memory_budget": "max"},
        ValueError,
        "memory_budget must be bytes, \"min\" or None, got 'max'",
    ),
    "weight of another dtype": (
        {"student_weight": _t(10, 8, dtype=torch.bfloat16)},
        TypeError,
        "student_weight is torch.bfloat16, student_hidden torch.float32: expected one dtype",
    ),
    "double precision of one head": (
        {"teacher_hidden": _t(4, 6, dtype=torch.float64), "teacher_weight": _t(10, 6, dtype=torch.float64)},
        TypeError,
        "teacher_hidden is torch.float64, student_hidden torch.float32: expected float64 of both or of neither",
    ),
    "bias of another length": (
        {"student_bias": _t(9)},
        ValueError,
        "student_bias must have the shape (10,) of student_weight's rows, got (9,)",
    ),
    "shard is a pair": ({"shard": (0, 10)}, TypeError, "shard must be a VocabShard, got tuple"),
    "shard of another size": (
        {"shard": VocabShard(0, 12, 11)},
        ValueError,
        "student_weight must hold the 12 rows 0 to 12 of its shard, got 10 rows",
    ),
    "sequence parallel shard": (
        {"shard": VocabShard(0, 10, 10, sequence_parallel=True)},
        ValueError,
        "shard is sequence_parallel, and linear_kl_div takes whole hidden states",
    ),
}  # fmt: skip


def good_arguments(rows: int = 10) -> dict[str, Any]:
    return {
        "student_hidden": _t(4, 8), "student_weight": _t(rows, 8),
        "teacher_hidden": _t(4, 6), "teacher_weight": _t(rows, 6),
    }  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_input(mistake) -> None:
    changes, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=re.escape(message)):
        linear_kl_div(**{**good_arguments(), **changes})


def check_bad_input(group, device, mistakes):
    """Each of ``mistakes`` on one rank alone raises on all, and leaves nothing behind."""
    rows = VocabShard.even(20, group).rows
    good = {k: x.to(device) for k, x in good_arguments(rows).items()}

    def on_device(x):
        if isinstance(x, tuple):
            return tuple(map(on_device, x))
        return x.to(device) if isinstance(x, torch.Tensor) else x

    def call(**changes):
        # compared anew: on GPUs a shard remembers
        return linear_kl_div(
            **{**good, **{k: on_device(x) for k, x in changes.items()}}, shard=VocabShard.even(20, group)
        )

    for name in mistakes:
        if name == "id past the end" and device.type != "cpu":
            # nothing is read back from a GPU: that token's loss is NaN
            continue
        changes, error, _ = MISTAKES[name]
        mine = dist.get_rank(group) == 1
        with pytest.raises(error, match=None if mine else "^rank 1 of the group"):
            call(**(changes if mine else {}))
        assert call() == 0
    for name, changes in (
        ("divergence", {"divergence": "reverse"}),
        ("temperature", {"temperature": 2.0}),
        ("the shape of student_hidden", {"student_hidden": _t(5, 8), "teacher_hidden": _t(5, 6)}),
        ("requires_grad of student_hidden", {"student_hidden": _t(4, 8).requires_grad_()}),
        ("the presence of mask", {"mask": torch.ones(4, dtype=torch.bool)}),
    ):
        with pytest.raises(ValueError, match=f"{name} must be the same on every rank"):
            call(**(changes if dist.get_rank(group) == 1 else {}))
    mask = torch.full((4,), dist.get_rank(group) == 1, device=device)
    top_k = _IDS.to(device) + dist.get_rank(group), _PROBS.to(device)
    for tokens in ({"mask": mask}, {**_TOP, "top_k": top_k}):
        with pytest.raises(ValueError, match=r"a checksum of (mask|the ids of top_k) must be the same on every rank"):
            call(**tokens)


def test_bad_input_of_one_rank(ranks) -> None:
    named = "no teacher", "teacher that learns", "id past the end", "mask of other tokens", "flat weight"
    ranks.run(check_bad_input, [*named, "unknown divergence"], ranks=2)


def check_dtensors(group, device):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, device.type)
    arguments = {k: x.to(device) for k, x in good_arguments(20).items()}
    arguments["student_weight"] = distribute_tensor(arguments["student_weight"], mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"student_weight is a DTensor: pass this rank's rows, .to_local\(\)"):
        linear_kl_div(**arguments)


def test_dtensors_are_refused(ranks) -> None:
    ranks.run(check_dtensors, ranks=2)
