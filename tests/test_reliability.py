"""Sizes past 32 bits, the same bits whatever else happens, regrouped batches, memory over many steps."""

from __future__ import annotations

import gc
import itertools
import resource

import pytest
import torch
from inputs import gradients_of, make_inputs
from tolerance import assert_gradients, assert_loss

from cce_dist import linear_cross_entropy, linear_log_probs

METHODS = ("recompute", "cached", "fused")


def step(hidden, weight, targets, **options):
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    wanted = [x for x in (hidden, weight) if x.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, wanted, torch.ones_like(loss))


def big(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.25


# the elements of hidden, of weight, of the logits pass 2**31; strides pass it earlier
@pytest.mark.gpu
@pytest.mark.parametrize("method", ["recompute", "cached"])
@pytest.mark.parametrize(("n", "d", "v"), [(2200000, 1024, 256), (256, 1024, 2200000), (40000, 64, 65536)])
def test_more_than_2_31_elements(n, d, v, method) -> None:
    """The last tokens' losses and hidden gradients are those of the same tokens alone, the last classes' gradients
    those of the reference."""
    hidden, weight = big(n, d).requires_grad_(), big(v, d, seed=1).requires_grad_()
    targets = torch.randint(v, (n,), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    targets[-3:] = torch.tensor([v - 1, v // 2, v - 2], device="cuda")
    budget = 24 << 30
    loss, d_hidden, d_weight = step(hidden, weight, targets, reduction="none", method=method, memory_budget=budget)
    last = slice(n - 200, n)
    few = hidden.detach()[last].clone().requires_grad_()
    alone, d_few, _ = step(few, weight, targets[last], reduction="none", memory_budget="min")
    assert torch.equal(loss[last], alone)
    torch.testing.assert_close(d_hidden[last], d_few, rtol=2**-6, atol=float(d_few.abs().max()) * 2**-8)
    # the last classes' gradient, from the losses' own normalisers
    with torch.no_grad():
        rows = weight[-64:].double()
        expected = torch.zeros(64, d, dtype=torch.float64, device="cuda")
        for start in range(0, n, 1 << 16):
            part = slice(start, start + (1 << 16))
            e, t = hidden[part].double(), targets[part]
            own = (hidden[part].float() * weight[t].float()).sum(-1).double()
            dx = torch.exp(e @ rows.T - (loss[part].double() + own)[:, None])
            local = t - (v - 64)
            hit = (local >= 0).nonzero()[:, 0]
            dx[hit, local[hit]] -= 1
            expected += dx.T @ e
    error = (d_weight[-64:].double() - expected).norm() / expected.norm()
    assert error < 5e-3, f"the last classes' gradient is {error:.1e} off"


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_hundred_runs_beside_another_stream(method) -> None:
    inputs = make_inputs(3000, 256, 5003, torch.bfloat16, device="cuda", ignored=0.2)
    expected = step(*inputs[:3], method=method, memory_budget=24 << 20 if method == "cached" else None)
    ballast, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for run in range(100):
        with torch.cuda.stream(other):
            for _ in range(run % 7):
                ballast = (ballast @ ballast).tanh()
        found = step(*inputs[:3], method=method, memory_budget=24 << 20 if method == "cached" else None)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), run


def check_regrouped(device, dtype, groupings):
    """A token's loss, log-probability and entropy have the same bits in every batch."""
    inputs = make_inputs(300, 48, 1003, dtype, device=device, ignored=0.1)

    def tokens(rows):
        batch = inputs.hidden[rows], inputs.weight, inputs.targets[rows]
        loss = linear_cross_entropy(*batch, reduction="none")
        return loss, *linear_log_probs(*batch, return_entropy=True)

    whole = tokens(torch.arange(300, device=device))
    generator = torch.Generator().manual_seed(0)
    for _ in range(groupings):
        size = int(torch.randint(1, 301, (), generator=generator))
        rows = torch.randperm(300, generator=generator)[:size].to(device)
        for ours, theirs in zip(tokens(rows), whole, strict=True):
            assert torch.equal(ours, theirs[rows]), f"{size} tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fifty_regroupings(dtype) -> None:
    check_regrouped(torch.device("cpu"), dtype, 50)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fifty_regroupings_on_gpus(dtype) -> None:
    check_regrouped(torch.device("cuda"), dtype, 50)


def check_sizes(device, dtype, least):
    """All of these crossed, 1000 of them, against the reference; gradients where every size is ``least``."""
    sizes = (1, 2, 3, 7, 31, 33, 127, 129, 1023, 4097)
    for n, d, v in itertools.product(sizes, repeat=3):
        inputs = make_inputs(n, d, v, dtype, device=device, ignored=0.2, seed=n + d + v)
        loss = linear_cross_entropy(*inputs[:3])
        assert_loss(loss.detach(), inputs)
        # of one class there is no gradient but roundings
        if v > 1 and min(n, d, v) >= least:
            assert_gradients(gradients_of(loss, inputs, {}), inputs)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_sizes_crossed() -> None:
    check_sizes(torch.device("cpu"), torch.float64, 1)


# where few numbers are summed, chance decides which of two roundings is the nearer
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_sizes_crossed_on_gpus(dtype) -> None:
    check_sizes(torch.device("cuda"), dtype, 31)


def check_steps(device, steps):
    """Thousands of steps with other tokens take no more memory than the first ones."""
    inputs = make_inputs(200, 32, 500, device=device)
    generator = torch.Generator(device).manual_seed(0)

    def used():
        gc.collect()
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device)
        # KiB, of the process at its largest
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    for index in range(steps):
        n = 1 + index * 7 % 200
        targets = torch.randint(500, (n,), device=device, generator=generator)
        method = (None, *METHODS)[index % 4]
        loss = linear_cross_entropy(inputs.hidden[:n], inputs.weight, targets, method=method)
        loss.backward()
        inputs.hidden.grad = inputs.weight.grad = None
        del loss, targets
        if index == steps // 10:
            before = used()
    assert used() <= before + (16 << 20 if device.type == "cpu" else 0)


@pytest.mark.slow
def test_ten_thousand_steps() -> None:
    check_steps(torch.device("cpu"), 10000)


@pytest.mark.gpu
def test_ten_thousand_steps_on_gpus() -> None:
    check_steps(torch.device("cuda"), 10000)
