"""A classifier's gradient that grows in the ``main_grad`` its parameter carries."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from inputs import Inputs, make_inputs, make_trained_inputs
from plans import forced_plan
from tolerance import assert_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from cce_dist import VocabShard, linear_cross_entropy, plan

SIZE = (60, 96, 1300)
PLANS = {
    "recompute": ("recompute", {"panel": 512, "wide": 0}),
    "recompute tail": ("recompute", {"panel": 256, "wide": 512}),
    "recompute blocks": ("recompute", {"panel": 512, "wide": 0, "rows": 32}),
    "cached some": ("cached", {"kept": 512, "panel": 256, "wide": 0}),
    "cached all": ("cached", {"kept": 1 << 20}),
}


def check_growth(device, dtype, method, fields, n, d, v):
    make = make_trained_inputs if dtype == torch.bfloat16 else make_inputs
    inputs = make(n, d, v, dtype, device=device, ignored=0.2)
    weight = inputs.weight
    weight.main_grad = torch.zeros(v, d, dtype=torch.promote_types(dtype, torch.float32), device=device)
    upstream = torch.tensor(-1.7, device=device)
    for times in (1, 2):
        with forced_plan(**fields) as plans:
            loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, method=method)
            assert plans[-1].method == method
            inputs.hidden.grad = None
            loss.backward(upstream)
        assert weight.grad is None
        assert weight.grad_added_to_main_grad is True
        if times == 1:
            first = weight.main_grad.clone()
        yardstick = "output" if dtype == torch.bfloat16 else "operands"
        grown = (weight.main_grad / times).to(dtype)
        assert_gradients([inputs.hidden.grad, grown, None], inputs, upstream, yardstick=yardstick)
    torch.testing.assert_close(weight.main_grad, first + first, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("plan", PLANS)
def test_it_grows(run, request, plan) -> None:
    size = (40, 64, 700) if "interpreter" in request.node.name else SIZE
    run(check_growth, torch.float32, *PLANS[plan], *size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_it_grows_in_full_precision(plan, dtype) -> None:
    check_growth(torch.device("cpu"), dtype, *PLANS[plan], *SIZE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_it_grows_on_a_gpu(plan, dtype) -> None:
    if dtype == torch.float16 and not plan.startswith("recompute"):
        pytest.skip("float16 is recomputed")
    check_growth(torch.device("cuda"), dtype, *PLANS[plan], *SIZE)


class _Largest(TorchDispatchMode):
    """The largest new tensor."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.numel, self.known = 0, {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", ["recompute", "cached some"])
def test_nothing_of_its_size_is_made(plan, dtype) -> None:
    n, d, v = 512, 512, 12000
    inputs, (method, fields) = make_inputs(n, d, v, dtype), PLANS[plan]
    for grows in (True, False):
        if grows:
            inputs.weight.main_grad = torch.zeros(v, d)
        else:
            del inputs.weight.main_grad
        with forced_plan(**fields):
            loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, method=method)
        known = [inputs.weight, inputs.weight.main_grad] if grows else [inputs.weight]
        with _Largest(*known) as largest:
            loss.backward()
        if grows:
            assert largest.numel < v * d // 2
        else:
            # or this would see nothing
            assert largest.numel >= v * d


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(39, 8), r"weight's shape \(40, 8\), got \(39, 8\)"),
        (torch.zeros(8, 40).T, r"contiguous.* got \(40, 8\) with the strides \(1, 40\)"),
    ],
    ids=["shape", "strides"],
)
def test_one_that_does_not_fit(main_grad, message) -> None:
    inputs = make_inputs(20, 8, 40)
    inputs.weight.main_grad = main_grad
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets)


def test_one_of_another_dtype_is_left_to_its_owner() -> None:
    inputs = make_inputs(20, 8, 40)
    inputs.weight.main_grad = torch.zeros(40, 8, dtype=torch.bfloat16)
    linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets).backward()
    assert (inputs.weight.main_grad == 0).all()
    assert not hasattr(inputs.weight, "grad_added_to_main_grad")
    assert_gradients([inputs.hidden.grad, inputs.weight.grad, None], inputs)


def test_a_frozen_weight_grows_nothing() -> None:
    inputs = make_inputs(20, 8, 40)
    inputs.weight.requires_grad_(False)
    inputs.weight.main_grad = torch.zeros(40, 8)
    linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets).backward()
    assert (inputs.weight.main_grad == 0).all()


def test_hooks_of_the_parameter_run() -> None:
    """Megatron's data parallelism learns from the parameter's node that its gradient is there."""
    inputs = make_inputs(20, 8, 40)
    inputs.weight.main_grad = torch.zeros(40, 8)
    node = inputs.weight.expand_as(inputs.weight).grad_fn.next_functions[0][0]
    seen: list[bool] = []
    node.register_hook(lambda *_: seen.append(inputs.weight.grad_added_to_main_grad))
    linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets).backward()
    assert seen == [True]


def test_the_plan_leaves_it_out() -> None:
    sizes = 8192, 4096, 128256
    usual, grown = plan(*sizes, device="sm_90"), plan(*sizes, device="sm_90", main_grad=True)
    assert grown.peak < usual.peak - 2 * 4096 * 128256 + (512 << 20)
    assert grown.wide == 0
    assert plan(*sizes, device="sm_90", main_grad=True, memory_budget=1 << 36).method == "cached"


def test_fused_is_refused() -> None:
    inputs = make_inputs(20, 8, 40)
    inputs.weight.main_grad = torch.zeros(40, 8)
    with pytest.raises(ValueError, match=r'"fused" would add to main_grad in forward.* use "cached"'):
        linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, method="fused")


def check_over_ranks(group, device, method):
    n, d, v = 41, 24, 701
    inputs = make_inputs(n, d, v, device=device, ignored=0.2)
    shard = VocabShard.padded(v, 64, group, sequence_parallel=True)
    rank, size = dist.get_rank(group), group.size()
    hidden = inputs.hidden.detach().split(-(-n // size))[rank].clone().requires_grad_()
    weight = inputs.weight.new_zeros(shard.rows, d)
    weight[: shard.classes] = inputs.weight.detach()[shard.start : shard.start + shard.classes]
    weight.requires_grad_()
    weight.main_grad = torch.zeros_like(weight)
    linear_cross_entropy(hidden, weight, inputs.targets, shard=shard, method=method).backward()
    assert weight.grad is None
    assert (weight.main_grad[shard.classes :] == 0).all()
    parts = [None] * size
    dist.all_gather_object(parts, (hidden.grad.cpu(), weight.main_grad[: shard.classes].cpu()), group=group)
    d_hidden, d_weight = (torch.cat(part).to(device) for part in zip(*parts, strict=True))
    assert_gradients([d_hidden, d_weight, None], Inputs(inputs.hidden, inputs.weight, inputs.targets, None))


@pytest.mark.parametrize("method", ["recompute", "cached"])
def test_it_grows_over_ranks(ranks, method) -> None:
    ranks.run(check_over_ranks, method, ranks=2)


def check_ranks_that_differ(group, device):
    inputs = make_inputs(20, 8, 40, device=device)
    shard = VocabShard.even(40, group)
    weight = inputs.weight.detach()[shard.start : shard.stop].clone().requires_grad_()
    if dist.get_rank(group) == 0:
        weight.main_grad = torch.zeros_like(weight)
    with pytest.raises(ValueError, match="the presence of main_grad must be the same on every rank"):
        linear_cross_entropy(inputs.hidden, weight, inputs.targets, shard=shard)


def test_ranks_that_differ(ranks) -> None:
    ranks.run(check_ranks_that_differ, ranks=2)
