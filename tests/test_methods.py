"""Every method of gradient, with sizes of work at which small inputs meet all of its seams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from inputs import IGNORED, Inputs, make_inputs, make_trained_inputs
from plans import forced_plan
from tolerance import assert_gradient, assert_gradients, assert_loss, reference_gradients

from cce_dist import VocabShard, linear_cross_entropy, validation
from cce_dist.autograd import second_pass, total
from cce_dist.kernels import runtime
from cce_dist.kernels.product import weight_gradient
from cce_dist.kernels.target import ClassSums
from cce_dist.planner import most_slabs

METHODS = ["recompute", "cached", "fused"]
KEEPING = ["cached", "fused"]
EVERYTHING = 1 << 20
# name -> (method, what its plan is made to say)
PLANS = {
    "recompute narrow": ("recompute", {"panel": 256, "wide": 0}),
    "recompute wide tail": ("recompute", {"panel": 256, "wide": 512}),
    "recompute blocks": ("recompute", {"panel": 256, "wide": 0, "rows": 32}),
    "cached all": ("cached", {"kept": EVERYTHING}),
    "cached some": ("cached", {"kept": 512, "panel": 256, "wide": 0}),
    "cached wide": ("cached", {"kept": 512, "panel": 256, "wide": 512, "part": 128}),
    "cached all lent": ("cached", {"kept": EVERYTHING, "lent": 512, "slab": 256}),
    "cached some lent": ("cached", {"kept": 768, "lent": 512, "slab": 256, "part": 64, "panel": 256, "wide": 0}),
    "cached blocks": ("cached", {"kept": 256, "panel": 1024, "wide": 0, "rows": 32}),
    "fused whole": ("fused", {"chunk": EVERYTHING}),
    "fused halves": ("fused", {"chunk": 128}),
    "fused ragged": ("fused", {"chunk": 32}),
}
# one of each method with the most seams
SEAMS = {"recompute": PLANS["recompute wide tail"], "cached": PLANS["cached some"], "fused": PLANS["fused ragged"]}
# the same for few tokens and classes, with a chunk, a panel and kept columns that are full, and others that are not
TINY = (20, 16, 330)
TINY_SEAMS = {
    "recompute": ("recompute", {"panel": 256, "wide": 0, "rows": 16}),
    "cached": ("cached", {"kept": 256, "panel": 256, "wide": 0, "rows": 16}),
    "fused": ("fused", {"chunk": 16}),
}
# and for memory that the classifier's gradient lends: two slabs of columns, one of own memory, others
LENT = ("cached", {"kept": 768, "lent": 512, "slab": 256, "part": 16, "panel": 256, "wide": 0, "rows": 16})
TINY_LENT = (20, 32, 900)
TINY_CASES = {method: (*TINY_SEAMS[method], TINY) for method in METHODS} | {"lent": (*LENT, TINY_LENT)}
# tokens, width and classes for several panels, those in the gradient's memory among them, kept columns and others,
# and several chunks, the last of each not full; and for the interpreter's small tiles
SIZE, SMALL = (133, 160, 1300), (40, 64, 700)


def loss_of(inputs: Inputs, **options) -> torch.Tensor:
    return linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias, **options)


def leaves(inputs: Inputs) -> list[torch.Tensor]:
    return [x for x in (inputs.hidden, inputs.weight, inputs.bias) if x is not None]


def gradients_of(loss: torch.Tensor, inputs: Inputs, upstream=None, **options) -> list[torch.Tensor | None]:
    """Of hidden, weight and bias."""
    found = list(torch.autograd.grad(loss, leaves(inputs), upstream, **options))
    return found if inputs.bias is not None else [*found, None]


def assert_same_bits(ones, others) -> None:
    for one, other in zip(ones, others, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def not_twice(request: pytest.FixtureRequest, alike: bool) -> None:
    """Leaves to --slow what the interpreter, a hundred times as slow as the twins, is told by a case like it."""
    if "interpreter" in request.node.name and alike and not request.config.getoption("--slow"):
        pytest.skip("slow: needs --slow")


def inputs_for(device, dtype, n, d, v, **options) -> tuple[Inputs, str]:
    """(inputs, their yardstick): 16-bit gradients by exponentials hold their promise for a trained model's tokens."""
    if dtype == torch.bfloat16:
        return make_trained_inputs(n, d, v, dtype, device=device, **options), "output"
    return make_inputs(n, d, v, dtype, device=device, seed=n + d + v, **options), "operands"


def check_plan(device, dtype, method, fields, n, d, v, bias, ignored):
    inputs, yardstick = inputs_for(device, dtype, n, d, v, bias=bias, ignored=ignored)
    with torch.no_grad():
        inputs.hidden[inputs.targets == IGNORED] = math.nan
    reduction, upstream = "mean", torch.tensor(-1.7, device=device)
    if method != "fused":
        reduction = "none"
        upstream = (torch.rand(n, generator=torch.Generator().manual_seed(1)) + 0.5).to(device)
    base = loss_of(inputs, reduction=reduction, method="recompute").detach()
    with forced_plan(**fields) as plans:
        loss = loss_of(inputs, reduction=reduction, method=method)
        assert plans[-1].method == method
        assert torch.equal(loss.detach(), base), "the loss depends on the method"
        gradients = gradients_of(loss, inputs, upstream)
        again = loss_of(inputs, reduction=reduction, method=method)
        assert_same_bits([loss, *gradients], [again, *gradients_of(again, inputs, upstream)])
    assert_loss(base, inputs, reduction=reduction)
    assert_gradients(gradients, inputs, upstream, yardstick=yardstick, reduction=reduction)
    assert (gradients[0][inputs.targets == IGNORED] == 0).all()


CASES = pytest.mark.parametrize(("bias", "ignored"), [(True, 0.3), (False, 0.0)], ids=["bias-ignored", "plain"])


@pytest.mark.parametrize("plan", PLANS)
@CASES
def test_every_plan(run, request, plan, bias, ignored) -> None:
    size = SMALL if "interpreter" in request.node.name else SIZE
    not_twice(request, not bias or plan not in ("recompute wide tail", "cached blocks", "fused ragged"))
    run(check_plan, torch.float32, *PLANS[plan], *size, bias, ignored)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_in_double_precision(plan) -> None:
    check_plan(torch.device("cpu"), torch.float64, *PLANS[plan], *SIZE, True, 0.3)


@pytest.mark.parametrize("plan", PLANS)
@CASES
def test_every_plan_in_bf16(run, request, plan, bias, ignored) -> None:
    if "interpreter" in request.node.name:
        pytest.skip("Triton 3.9's interpreter gets products of transposed bf16 tiles wrong")
    run(check_plan, torch.bfloat16, *PLANS[plan], 250, 256, 1500, bias, ignored)


def test_small_sizes_meet_the_seams() -> None:
    # else the tests above and below would say little
    for (n, d, v), last in ((SIZE, 16), (SMALL, 16), ((250, 256, 1500), None)):
        rows, wide = -(-n // 16) * 16, PLANS["recompute wide tail"][1]["wide"]
        memory = v - -(-rows * wide // d)
        assert memory >= 256, "no panel fits the memory of the classifier's gradient"
        assert v - memory // 256 * 256 > 256
        assert v > 512 + 128
        # and kept columns have memory for a wide one
        assert rows * wide <= 512 * d
        assert last is None or (rows > 32 and rows % 32 == last)


def check_halves(device):
    """A bf16 gradient whose fp32 sum waits in halves. Operands of fp16, which the interpreter gets right."""
    generator = torch.Generator().manual_seed(0)
    n, width, d = 80, 130, 72
    panel, e = (torch.randn(n, k, generator=generator).to(device, torch.float16) for k in (width, d))
    # as panels are past the tokens
    panel[75:] = 0
    rows = torch.randn(n, d, generator=generator).to(device)
    first = torch.where(torch.arange(width) % 3 == 0, torch.arange(width) % 32, -1).to(device, torch.int32)
    count, scale = torch.tensor(75, device=device), torch.tensor(0.7, device=device)
    sums = ClassSums(first, rows)
    out = torch.empty(width, d, dtype=torch.bfloat16, device=device)
    low = torch.empty(width, d, dtype=torch.int16, device=device)

    def add(start, last):
        part = slice(start, start + 32)
        weight_gradient(
            panel[part], e[part], count, scale, out, row0=start, sums=sums, low=low, add=start > 0, last=last
        )

    add(0, False)
    add(32, False)
    truth = panel[:64].double().T @ e[:64].double() + 2 * torch.where(first[:, None] >= 0, rows[first.long()], 0)
    whole = ((out.view(torch.int16).int() << 16) | (low.int() & 0xFFFF)).view(torch.float32)
    assert (whole.double() - truth).norm() <= 1e-6 * truth.norm()
    add(64, True)
    truth = panel[:75].double().T @ e[:75].double() + 3 * torch.where(first[:, None] >= 0, rows[first.long()], 0)
    truth *= 0.7
    # as good as the truth rounded once. the interpreter cuts where chips round
    allowed = 2.2 if runtime.INTERPRETED else 1.01
    assert (out.double() - truth).norm() <= allowed * (truth.to(torch.bfloat16) - truth).norm()


def test_sums_that_wait_in_halves(run) -> None:
    run(check_halves)


def check_two_backwards(device, dtype, method, fields, factors, size):
    inputs, yardstick = inputs_for(device, dtype, *size, bias=True, ignored=0.1)
    with forced_plan(**fields):
        loss = loss_of(inputs, method=method)
        for factor in factors:
            # fused: the first call's gradients were made in forward, the second's are computed anew
            upstream = torch.tensor(factor, device=device)
            gradients = gradients_of(loss, inputs, upstream, retain_graph=True)
            assert_gradients(gradients, inputs, upstream, yardstick=yardstick)


@pytest.mark.parametrize("method", [*KEEPING, "lent"])
@pytest.mark.parametrize("factors", [(3.0, -0.5), (0.0, 1.0)], ids=str)
def test_two_backwards_with_upstream_gradients_of_their_own(run, request, method, factors) -> None:
    not_twice(request, factors != (3.0, -0.5))
    method, fields, size = TINY_CASES[method]
    run(check_two_backwards, torch.float32, method, fields, factors, size)


def check_lent_memory(device):
    """Exponentials wait in what becomes the classifier's gradient."""
    inputs = make_inputs(*TINY_LENT, device=device, bias=True, ignored=0.2)
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with forced_plan(**LENT[1]), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(inputs, method="cached")
    [lent] = [x for x in saved if x.shape == inputs.weight.shape and x is not inputs.weight]
    loss.backward(retain_graph=True)
    assert inputs.weight.grad.data_ptr() == lent.data_ptr()
    assert_gradients([x.grad for x in leaves(inputs)], inputs)
    # what is done to the gradient is not done to what another backward needs
    first = inputs.weight.grad.clone()
    inputs.weight.grad.mul_(3)
    gradients = gradients_of(loss, inputs)
    assert torch.equal(inputs.weight.grad, 3 * first)
    assert_gradients(gradients, inputs)


class LateStream:
    """A second stream that gets to its work as late as it may: when it is joined."""

    queue: list[Callable[[], None]] = []  # noqa: RUF012
    open = False

    def __init__(self, device: torch.device) -> None:
        self.busy = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.busy = LateStream.open = True
        yield
        LateStream.open = False

    def join(self) -> None:
        while LateStream.queue:
            LateStream.queue.pop(0)()
        self.busy = False

    @classmethod
    def late(cls, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args, **kwargs) -> None:
            cls.queue.append(lambda: kernel(*args, **kwargs))
            if not cls.open:
                cls.queue.pop()()

        return call


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "slices"])
@pytest.mark.parametrize("plan", PLANS)
def test_what_runs_beside_may_be_late(monkeypatch, plan, sequence_parallel) -> None:
    inputs = make_inputs(*SIZE, bias=True, ignored=0.3)
    method, fields = PLANS[plan]
    shard = VocabShard(0, SIZE[2], SIZE[2], sequence_parallel=sequence_parallel)

    def step() -> list[torch.Tensor | None]:
        with forced_plan(**fields):
            return gradients_of(loss_of(inputs, method=method, shard=shard), inputs)

    expected = step()
    for module in (second_pass, total):
        monkeypatch.setattr(module, "SecondStream", LateStream)
        for name in ("hidden_gradient", "target_rows"):
            monkeypatch.setattr(module, name, LateStream.late(getattr(module, name)))
    assert_same_bits(step(), expected)
    assert not LateStream.queue


def test_lent_memory(run, request) -> None:
    not_twice(request, True)
    run(check_lent_memory)


def test_lent_memory_is_what_the_plan_says() -> None:
    # else the tests that force it would say little
    for n, d, v in (TINY_LENT, SIZE, (250, 256, 1500)):
        for rows in (32, 64, 128):
            assert most_slabs(-(-n // rows) * rows, d, v, 256) >= (2 if rows == 32 or n > 20 else 0)
    # a gradient of 40 rows (16 more for the address) whose first 8 are written while all slabs are there
    assert most_slabs(4, 4, 40 + 16, 8) == 4
    assert most_slabs(8, 4, 40 + 16, 8) == 2
    assert most_slabs(8, 4, 8, 8) == 0


@pytest.mark.parametrize("method", KEEPING)
def test_large_and_small_upstream_gradients_in_bf16(run, request, method) -> None:
    if "interpreter" in request.node.name:
        pytest.skip("scaling is arithmetic in fp32, which other tests interpret")
    for factors in ((65536.0, 1e-8), (1e-8, 65536.0)):
        run(check_two_backwards, torch.bfloat16, *SEAMS[method], factors, (400, 64, 1100))


def check_rows_far_from_their_reference(device, dtype, method, fields, distance, n, d, v):
    """One row whose logits lie ``distance`` above its target's, from one class on; of another, below."""
    inputs, yardstick = inputs_for(device, dtype, n, d, v, bias=True)
    with torch.no_grad():
        for row, sign in ((3, 1.0), (13, -1.0)):
            other = (inputs.targets[row] + v // 2) % v
            away = inputs.weight[other].double() - inputs.weight[inputs.targets[row]].double()
            inputs.hidden[row] = (sign * distance * away / away.square().sum()).to(dtype)
        x = inputs.hidden.double() @ inputs.weight.double().T + inputs.bias.double()
        above = x.amax(1) - x.gather(1, inputs.targets[:, None])[:, 0]
        assert above[3] > 0.9 * distance
    with forced_plan(**fields):
        loss = loss_of(inputs, method=method)
        assert torch.equal(loss.detach(), loss_of(inputs, method="recompute").detach())
        gradients = gradients_of(loss, inputs)
    assert_loss(loss.detach(), inputs)
    assert_gradients(gradients, inputs, yardstick=yardstick)
    # that row alone as well: among many others its error would not show in the norm
    truth, yard = (reference_gradients(inputs, None, x, {})[0] for x in (torch.float64, torch.float32))
    assert_gradient(gradients[0][3], truth[3], [yard[3]], "the row", largest_logit=2 * distance)


@pytest.mark.parametrize("distance", [60.0, 200.0, 5000.0])
@pytest.mark.parametrize("method", [*KEEPING, "lent"])
def test_rows_far_from_their_reference(run, request, method, distance) -> None:
    not_twice(request, distance != 200.0)
    method, fields, size = TINY_CASES[method]
    run(check_rows_far_from_their_reference, torch.float32, method, fields, distance, *size)


@pytest.mark.parametrize("method", KEEPING)
def test_rows_far_from_their_reference_in_bf16(run, request, method) -> None:
    if "interpreter" in request.node.name:
        pytest.skip("Triton 3.9's interpreter gets products of transposed bf16 tiles wrong")
    run(check_rows_far_from_their_reference, torch.bfloat16, *SEAMS[method], 200.0, 500, 40, 1100)


def check_poisoned_rows(device, method, fields, size):
    inputs = make_inputs(*size, device=device, bias=True)
    rest = torch.ones(size[0], dtype=torch.bool, device=device)
    with torch.no_grad():
        for row, value in ((3, math.nan), (7, math.inf), (18, -math.inf)):
            inputs.hidden[row] = value
            rest[row] = False
    reduction = "sum" if method == "fused" else "none"
    with forced_plan(**fields):
        loss = loss_of(inputs, reduction=reduction, method=method)
        d_hidden, *_ = gradients_of(loss.sum(), inputs)
    if method != "fused":
        assert loss.isnan().equal(~rest)
    assert loss.sum().isnan()
    assert d_hidden[~rest].isnan().any(1).all()
    # what the others get without them
    clean = inputs._replace(targets=torch.where(rest, inputs.targets, IGNORED))
    clean = clean._replace(hidden=clean.hidden.detach().masked_fill(~rest[:, None], 0))
    truth, yard = (
        reference_gradients(clean, None, dtype, {"reduction": "sum"})[0] for dtype in (torch.float64, torch.float32)
    )
    assert_gradient(d_hidden[rest], truth[rest], [yard[rest]], "the other rows", largest_logit=10)


@pytest.mark.parametrize("method", TINY_CASES)
def test_rows_without_a_number_poison_themselves_alone(run, request, method) -> None:
    not_twice(request, method in ("recompute", "lent"))
    run(check_poisoned_rows, *TINY_CASES[method])


def check_frozen(device, method, fields, size, trained):
    inputs = make_inputs(*size, device=device, bias=True, ignored=0.2)
    for name in {"hidden", "weight", "bias"} - set(trained):
        getattr(inputs, name).requires_grad_(False)
    with forced_plan(**fields):
        loss_of(inputs, method=method).backward()
    assert_gradients([x.grad for x in leaves(inputs)], inputs)
    for name in ("hidden", "weight", "bias"):
        assert (getattr(inputs, name).grad is not None) == (name in trained)


@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")], ids="-".join)
@pytest.mark.parametrize("method", TINY_CASES)
def test_frozen_inputs_get_no_gradient(run, request, method, trained) -> None:
    not_twice(request, method in ("recompute", "lent") or trained == ("hidden", "bias"))
    run(check_frozen, *TINY_CASES[method], trained)


def check_nothing_to_do(device, method, n):
    inputs = make_inputs(n, 8, 70, device=device, bias=True, ignored=1.1)
    with torch.no_grad():
        inputs.hidden.fill_(math.nan)
    loss = loss_of(inputs, method=method)
    assert loss == 0
    loss.backward(retain_graph=True)
    loss.backward()
    assert all((x.grad == 0).all() for x in leaves(inputs))


@pytest.mark.parametrize("n", [0, 1, 35])
@pytest.mark.parametrize("method", METHODS)
def test_no_token(run, method, n) -> None:
    run(check_nothing_to_do, method, n)


def check_one_class(device, method):
    inputs = make_inputs(35, 8, 1, device=device, bias=True, ignored=0.2)
    loss = loss_of(inputs, method=method)
    loss.backward()
    # the kernels' exponentials are off by a last bit
    assert loss.abs() <= 2.0**-22
    assert all((x.grad.abs() <= 1e-6).all() for x in leaves(inputs))


@pytest.mark.parametrize("method", METHODS)
def test_one_class(run, method) -> None:
    run(check_one_class, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("before", [0, 1])
def test_double_backward_raises(method, before) -> None:
    inputs = make_inputs(4, 8, 10)
    loss = loss_of(inputs, method=method)
    for _ in range(before):
        gradients_of(loss, inputs, retain_graph=True)
    gradient, _, _ = gradients_of(loss, inputs, torch.ones((), requires_grad=True), create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        gradient.norm().backward()


def check_inputs_stay(device, method, fields):
    inputs = make_inputs(*TINY, device=device, bias=True, ignored=0.2)
    whole = (*leaves(inputs), inputs.targets)
    before = [(x._version, x.detach().clone()) for x in whole]
    with forced_plan(**fields):
        loss = loss_of(inputs, method=method)
        for _ in range(2):
            gradients_of(loss, inputs, retain_graph=True)
    for x, (version, value) in zip(whole, before, strict=True):
        assert x._version == version
        assert torch.equal(x, value), "an input was written to"


@pytest.mark.parametrize("method", METHODS)
def test_inputs_stay_as_they_are(run, request, method) -> None:
    not_twice(request, method == "recompute")
    run(check_inputs_stay, *TINY_SEAMS[method])


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("method", METHODS)
def test_an_input_changed_before_backward_raises(method, name) -> None:
    inputs = make_inputs(6, 8, 10, bias=True)
    loss = loss_of(inputs, method=method)
    with torch.no_grad():
        getattr(inputs, name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def check_mostly_ignored(device, dtype, method, fields, ignored):
    # the last chunks hold no token
    inputs, yardstick = inputs_for(device, dtype, 100, 16, 330, bias=True, ignored=ignored)
    with torch.no_grad():
        inputs.hidden[inputs.targets == IGNORED] = math.nan
    with forced_plan(**fields):
        loss = loss_of(inputs, method=method)
        assert torch.equal(loss.detach(), loss_of(inputs, method="recompute").detach())
        gradients = gradients_of(loss, inputs)
    assert_gradients(gradients, inputs, yardstick=yardstick)
    assert (gradients[0][inputs.targets == IGNORED] == 0).all()


@pytest.mark.parametrize("ignored", [0.5, 0.9])
@pytest.mark.parametrize("method", KEEPING)
def test_mostly_ignored(run, request, method, ignored) -> None:
    not_twice(request, (method, ignored) != ("fused", 0.5))
    run(check_mostly_ignored, torch.float32, *TINY_SEAMS[method], ignored)


# a spread of shapes by every plan: the edges of tiles, groups of rows and kept parts, one token, one feature
SHAPES = [(1, 1, 1), (1, 40, 257), (15, 7, 255), (16, 64, 256), (17, 33, 513), (48, 32, 512), (49, 100, 1025)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("bias", [-30.0, False], ids=["bias", "plain"])
def test_ragged_shapes_by_every_plan(run, shape, plan, bias) -> None:
    run(check_plan, torch.float32, *PLANS[plan], *shape, bias, 0.2)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("method", KEEPING)
def test_ragged_shapes(run, request, shape, method) -> None:
    not_twice(request, shape[2] > 257)
    run(check_plan, torch.float32, *TINY_SEAMS[method], *shape, -30.0, 0.2)


def check_far_below_zero(device, method, fields, n, d, v):
    # without its maximum taken off, or with one that began at 0, no exponential is left of a row
    inputs = make_inputs(n, d, v, device=device, bias=-200.0)
    with forced_plan(**fields):
        loss = loss_of(inputs, method=method)
        gradients = gradients_of(loss, inputs)
    assert_loss(loss.detach(), inputs)
    assert_gradients(gradients, inputs)


@pytest.mark.parametrize("method", METHODS)
def test_logits_far_below_zero(run, request, method) -> None:
    not_twice(request, method != "recompute")
    run(check_far_below_zero, *TINY_SEAMS[method], *((6, 8, 70) if "interpreter" in request.node.name else TINY))


@pytest.mark.parametrize("method", METHODS)
def test_the_error_of_many_pieces_is_that_of_one(method) -> None:
    """Of a loss, and of a gradient that chunks of tokens add to."""
    inputs = make_trained_inputs(1024, 32, 330, torch.bfloat16, ignored=0.2)
    count = int((inputs.targets != IGNORED).sum())
    assert int(torch.tensor(count, dtype=torch.bfloat16)) != count, "16 bits have the count"
    truth = reference_gradients(inputs, None, torch.float64, {})[1]
    few, many = {"recompute": ({"panel": 1 << 20}, {"panel": 256, "wide": 0, "rows": 16}),
                 "cached": ({"kept": EVERYTHING}, {"kept": 256, "panel": 256, "wide": 0, "rows": 16}),
                 "fused": ({"chunk": EVERYTHING}, {"chunk": 16})}[method]  # fmt: skip
    errors = []
    for fields in (few, many):
        with forced_plan(**fields):
            loss = loss_of(inputs, method=method)
            _, d_weight, _ = gradients_of(loss, inputs)
        assert_loss(loss.detach(), inputs)
        errors.append((d_weight.double() - truth).norm())
    assert errors[1] <= 1.02 * errors[0]


@pytest.mark.parametrize("method", METHODS)
def test_small_entries_are_not_left_out(method) -> None:
    # of a nearly even softmax: each entry but the targets' is below what a filter takes for nothing, 2**-12
    inputs = make_inputs(67, 32, 8193, torch.bfloat16, spread=0.2, ignored=0.2)
    gradients = gradients_of(loss_of(inputs, method=method), inputs)
    assert_gradients(gradients, inputs)
    others = torch.ones(8193, dtype=torch.bool)
    others[inputs.targets[inputs.targets != IGNORED]] = False
    assert gradients[1][others].any(1).all()


def check_targets_of_no_class(device, method, targets):
    # as on a GPU, where nobody looks at targets beforehand
    reduction = "sum" if method == "fused" else "none"
    right = make_inputs(10, 8, 100, device=device)
    others = torch.arange(10, device=device) != 4
    total = loss_of(right, method=method, reduction=reduction)
    expected, *_ = gradients_of(total.sum(), right)
    for target in targets:
        wrong = right._replace(targets=right.targets.clone())
        wrong.targets[4] = target
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(validation, "validate_shard", lambda w, *_: VocabShard(0, len(w), len(w)))
            loss = loss_of(wrong, method=method, reduction=reduction)
        found, *_ = gradients_of(loss.sum(), wrong)
        assert loss.sum().isnan()
        if reduction == "none":
            assert loss[4].isnan()
            assert torch.equal(loss[others], total[others])
        torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_targets_of_no_class_are_nobodys_but_their_own(run, request, method) -> None:
    not_twice(request, method != "fused")
    interpreted = "interpreter" in request.node.name
    run(check_targets_of_no_class, method, (100, -(2**40)) if interpreted else (-1, 100, 2**31 + 7, 2**40, -(2**40)))
