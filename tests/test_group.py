"""Groups of ranks: one loss for every size, ranks that differ from one another, several groups at once, ranks that
fail. Also under torchrun, but for the last."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from inputs import Inputs, make_inputs
from plans import forced_plan
from pool import JobRanks, SpawnedRanks, process_context, subgroup
from shards import assert_same_bits
from test_sharded import assert_sharded_gradients, rows_of
from tolerance import assert_loss

from cce_dist import VocabShard, linear_cross_entropy, validation
from cce_dist.parallel import agreement

METHODS = ["recompute", "cached", "fused"]
# a method as the planner would have it, and in small pieces
PLANS = {
    "recompute": ("recompute", {}),
    "recompute by panels": ("recompute", {"panel": 256, "rows": 32, "wide": 0}),
    "cached": ("cached", {}),
    "cached in part": ("cached", {"kept": 256, "panel": 256, "rows": 32, "wide": 0}),
    "fused": ("fused", {}),
    "fused by chunks": ("fused", {"chunk": 16}),
}


def loss_of(inputs: Inputs, leaves, shard, method=None, fields=None, **options) -> torch.Tensor:
    hidden, weight, bias = leaves
    with forced_plan(**(fields or {})):
        return linear_cross_entropy(hidden, weight, inputs.targets, bias=bias, shard=shard, method=method, **options)


def leaves_of(inputs: Inputs, shard: VocabShard) -> list[torch.Tensor]:
    """New leaves: hidden, or this rank's slice of it, and this rank's rows of weight and bias."""
    hidden = inputs.hidden.detach()
    if shard.sequence_parallel:
        rank, size = dist.get_rank(shard.group), shard.group.size()
        # longer from rank to rank
        start, stop = (len(hidden) * r**2 // size**2 for r in (rank, rank + 1))
        hidden = hidden[start:stop]
    return [hidden.clone().requires_grad_(), *rows_of(inputs, shard)]


def step(inputs: Inputs, shard, method=None, fields=None, upstream=None, **options) -> list[torch.Tensor]:
    """The loss of new leaves, and their gradients."""
    leaves = leaves_of(inputs, shard)
    loss = loss_of(inputs, leaves, shard, method, fields, **options)
    loss.backward(upstream)
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def assert_equal(these, those, what: str) -> None:
    for name, one, other in zip(("loss", "dE", "dC", "db"), these, those, strict=True):
        assert (one is None) == (other is None), f"{what}: one {name} is None"
        assert one is None or torch.equal(one, other), f"{what}: {name} has other bits"


@pytest.fixture
def many_ranks(ranks) -> Iterator[JobRanks | SpawnedRanks]:
    """Up to eight."""
    if isinstance(ranks, JobRanks):
        yield ranks
        return
    these = SpawnedRanks(size=8)
    yield these
    these.close()


def check_one_loss(group, device, dtype, vocabularies):
    for v, slices in itertools.product(vocabularies, [False, True]):
        inputs = make_inputs(37, 24, v, dtype, device=device, bias=True, ignored=0.2, seed=v)
        shard = VocabShard.even(v, group, multiple_of=256, sequence_parallel=slices)
        whole = [inputs.hidden, inputs.weight, inputs.bias]
        one = {r: loss_of(inputs, whole, None, "recompute", reduction=r).detach() for r in ("mean", "none")}
        for name, plan in PLANS.items():
            first = step(inputs, shard, *plan)
            assert torch.equal(first[0], one["mean"]), f"{name}: the loss of {group.size()} ranks has other bits"
            assert_equal(step(inputs, shard, *plan), first, f"{name}, a second run")
            assert_same_bits(first[0], group)
            if not slices:
                assert_same_bits(first[1], group)
            if plan[0] != "fused":
                tokens = loss_of(inputs, leaves_of(inputs, shard), shard, *plan, reduction="none")
                assert torch.equal(tokens, one["none"]), f"{name}: a token's loss has other bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_loss_for_every_size(ranks, size, dtype) -> None:
    ranks.run(check_one_loss, dtype, [1300], ranks=size)


def test_one_loss_for_eight_ranks(many_ranks) -> None:
    # one tile each, the last one short, and two ranks that have none
    many_ranks.run(check_one_loss, torch.float32, [2000, 1300], ranks=8)


def cancelling_inputs(size: int, device: torch.device) -> Inputs:
    """Shares of dE that are large and cancel between the ranks, in features of which no logit depends."""
    inputs = make_inputs(64, 64, 512 * size, torch.bfloat16, device=device)
    with torch.no_grad():
        inputs.hidden[:, 32:] = 0
        sign = torch.arange(512 * size, device=device) // 512 % 2 * 2 - 1
        inputs.weight[:, 32:] = 8 * sign[:, None]
        inputs.weight[inputs.targets, 32:] = 0
    return inputs


def check_hidden_gradient_is_reduced_in_fp32(group, device):
    size = group.size()
    inputs = cancelling_inputs(size, device)
    hidden, weight = inputs.hidden.detach().double(), inputs.weight.detach().double()
    dx = (hidden @ weight.T).softmax(-1)
    dx[torch.arange(64, device=device), inputs.targets] -= 1
    shares = [dx[:, rows] @ weight[rows] / 64 for rows in torch.arange(512 * size, device=device).split(512)]
    truth = sum(shares)
    # what is left where each share is rounded before the reduction
    rounded = sum(share.bfloat16().double() for share in shares).bfloat16().double() - truth
    for slices, (name, plan) in itertools.product([False, True], PLANS.items()):
        shard = VocabShard.even(512 * size, group, sequence_parallel=slices)
        hidden, weight, _ = leaves_of(inputs, shard)
        loss_of(inputs, (hidden, weight, None), shard, *plan).backward()
        gradient = hidden.grad
        if slices:
            parts = [None] * size
            dist.all_gather_object(parts, gradient.cpu(), group=group)
            gradient = torch.cat(parts).to(device)
        error = gradient.double() - truth
        assert error.norm() < rounded.norm() / 4, f"{name}: {error.norm():.2e}, rounded shares {rounded.norm():.2e}"


@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_of_hidden_is_reduced_in_fp32(ranks, size) -> None:
    ranks.run(check_hidden_gradient_is_reduced_in_fp32, ranks=size)


def check_hidden_grad_differs(group, device, odd):
    rank = dist.get_rank(group)
    inputs = make_inputs(20, 24, 300, device=device, bias=True)
    message = (
        "requires_grad of hidden must be the same on every rank of the group: "
        f"rank 0 has {odd != 0}, rank {odd or 1} {odd == 0}"
    )
    for method in METHODS:
        # compared anew: on GPUs a shard remembers
        shard = VocabShard.even(300, group)
        leaves = leaves_of(inputs, shard)
        leaves[0].requires_grad_(rank != odd)
        with pytest.raises(ValueError, match=re.escape(message)):
            loss_of(inputs, leaves, shard, method)
        shard = VocabShard.even(300, group)
        leaves = leaves_of(inputs, shard)
        with (
            torch.set_grad_enabled(rank != odd),
            pytest.raises(ValueError, match="whether gradients are recorded must be the same on every rank"),
        ):
            loss_of(inputs, leaves, shard, method)
        assert_loss(step(inputs, VocabShard.even(300, group), method)[0], inputs)


@pytest.mark.parametrize(("odd", "size"), [(0, 2), (1, 2), (0, 3), (2, 3)])
def test_hidden_that_asks_for_a_gradient_on_some_ranks_alone(ranks, odd, size) -> None:
    ranks.run(check_hidden_grad_differs, odd, ranks=size)


def check_frozen_on_one_rank(group, device, hidden_grad, slices):
    rank = dist.get_rank(group)
    inputs = make_inputs(37, 24, 601, device=device, bias=True, ignored=0.2)
    shard = VocabShard.even(601, group, sequence_parallel=slices)
    for plan in PLANS.values():
        whole = step(inputs, shard, *plan)
        if not slices:
            assert_sharded_gradients(*leaves_with(whole, inputs, shard), shard, inputs)
        # of the leaves that a rank has frozen
        for frozen, odd in itertools.product([(1,), (2,), (1, 2)], [0, group.size() - 1]):
            leaves = leaves_of(inputs, shard)
            leaves[0].requires_grad_(hidden_grad)
            for index in frozen if rank == odd else ():
                leaves[index].requires_grad_(False)
            asked = [leaf.requires_grad for leaf in leaves]
            loss = loss_of(inputs, leaves, shard, *plan)
            assert torch.equal(loss, whole[0])
            assert loss.requires_grad == any(asked)
            if loss.requires_grad:
                loss.backward()
            for leaf, gradient, asks in zip(leaves, whole[1:], asked, strict=True):
                assert torch.equal(leaf.grad, gradient) if asks else leaf.grad is None


def leaves_with(results, inputs, shard) -> list[torch.Tensor]:
    leaves = leaves_of(inputs, shard)
    for leaf, gradient in zip(leaves, results[1:], strict=True):
        leaf.grad = gradient
    return leaves


@pytest.mark.parametrize(("hidden_grad", "slices"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("size", [2, 3])
def test_weight_frozen_on_one_rank(ranks, size, hidden_grad, slices) -> None:
    ranks.run(check_frozen_on_one_rank, hidden_grad, slices, ranks=size, timeout=40)


def check_main_grad_frozen_on_one_rank(group, device):
    inputs = make_inputs(37, 24, 601, device=device, bias=True, ignored=0.2)
    shard = VocabShard.even(601, group)
    for method in ("recompute", "cached"):
        whole = step(inputs, shard, method)
        leaves = leaves_of(inputs, shard)
        weight = leaves[1]
        weight.main_grad = torch.zeros_like(weight)
        if dist.get_rank(group) == 0:
            weight.requires_grad_(False)
        loss = loss_of(inputs, leaves, shard, method)
        loss.backward()
        assert torch.equal(loss, whole[0])
        assert weight.grad is None
        assert torch.equal(leaves[0].grad, whole[1])
        expected = whole[2] if weight.requires_grad else torch.zeros_like(weight)
        torch.testing.assert_close(weight.main_grad, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("size", [2, 3])
def test_main_grad_of_a_weight_frozen_on_one_rank(ranks, size) -> None:
    ranks.run(check_main_grad_frozen_on_one_rank, ranks=size)


def check_slices_of_other_lengths(group, device):
    # as on a GPU, where a group remembers: the first rank's slice is as long as before, and it would not ask again
    inputs = make_inputs(30, 24, 300, device=device, bias=True)
    shard = VocabShard.even(300, group, sequence_parallel=True)
    _, weight, bias = leaves_of(inputs, shard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_comparing_waits", lambda device: True)
        hidden = inputs.hidden.detach().split([10, 10, 10])[dist.get_rank(group)]
        loss = linear_cross_entropy(hidden, weight, inputs.targets, bias=bias, shard=shard)
        assert_loss(loss.detach(), inputs)
        hidden = inputs.hidden.detach().split([10, 9, 11])[dist.get_rank(group)]
        if dist.get_rank(group):
            with pytest.raises(ValueError, match=r"slice has the shape \(\d+,\), and had \(10,\) in an earlier call"):
                linear_cross_entropy(hidden, weight, inputs.targets, bias=bias, shard=shard)
        # a new shard compares anew
        other = VocabShard.even(300, group, sequence_parallel=True)
        loss = linear_cross_entropy(hidden, weight, inputs.targets, bias=bias, shard=other)
        assert_loss(loss.detach(), inputs)


def test_slices_that_change_their_lengths(ranks) -> None:
    ranks.run(check_slices_of_other_lengths, ranks=3, timeout=40)


def check_no_tokens(group, device):
    for n, plan, reduction in itertools.product([0, 9], PLANS.values(), ["mean", "sum"]):
        inputs = make_inputs(n, 24, 300, device=device, bias=True, ignored=1.1)
        with torch.no_grad():
            inputs.hidden.fill_(math.nan)
        results = step(inputs, VocabShard.chunked(300, group), *plan, reduction=reduction)
        for tensor in results:
            assert (tensor == 0).all()


@pytest.mark.parametrize("size", [2, 3])
def test_no_tokens_in_every_method(ranks, size) -> None:
    ranks.run(check_no_tokens, ranks=size)


def check_empty_shards(group, device, bounds):
    rank = dist.get_rank(group)
    inputs = make_inputs(37, 24, 701, device=device, bias=True, ignored=0.2)
    shard = VocabShard(bounds[rank], bounds[rank + 1], 701, group)
    one = loss_of(inputs, [inputs.hidden, inputs.weight, inputs.bias], None).detach()
    for plan in PLANS.values():
        results = step(inputs, shard, *plan)
        assert torch.equal(results[0], one)
        assert_same_bits(results[1], group)
        assert_sharded_gradients(*leaves_with(results, inputs, shard), shard, inputs)


@pytest.mark.parametrize(
    "bounds", [[0, 0, 512, 512, 701], [0, 701, 701, 701, 701], [0, 256, 256, 256, 701], [0, 0, 0, 256, 701]], ids=str
)
def test_empty_shards_in_every_method(ranks, bounds) -> None:
    ranks.run(check_empty_shards, bounds, ranks=4)


# before and past the vocabulary, in the rows of padding, and classes where 32 bits would wrap around
NO_CLASS = [-1, 300, 301, 2**31 - 1, 2**32 + 5, -(2**32) + 5, 2**62]


def check_targets_of_nobody(group, device):
    inputs = make_inputs(20, 24, 300, device=device, bias=True, ignored=0.2)
    inputs.targets[3] = 7
    shard = VocabShard.padded(300, 64, group)
    assert any(padding > 300 for padding in bounds_of(shard)), "no rank has padding"
    for method, target in itertools.product(METHODS, NO_CLASS):
        wrong = inputs._replace(targets=inputs.targets.clone())
        wrong.targets[3] = target
        if device.type == "cpu":
            with pytest.raises(IndexError, match=re.escape("targets must lie in [0, 300) or be ignore_index -100")):
                step(wrong, shard, method)
            # once more as on a GPU, where the targets are not looked at
            with unchecked_targets():
                assert_loses_one_token(wrong, inputs, shard, method)
        else:
            assert_loses_one_token(wrong, inputs, shard, method)


def bounds_of(shard: VocabShard) -> list[int]:
    stops = [None] * shard.group.size()
    dist.all_gather_object(stops, shard.stop, group=shard.group)
    return stops


@contextmanager
def unchecked_targets() -> Iterator[None]:
    validate = validation.validate_shard

    def without_targets(weight, targets, ignore_index, shard):
        return validate(weight, targets[:0], ignore_index, shard)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "validate_shard", without_targets)
        yield


def assert_loses_one_token(wrong: Inputs, right: Inputs, shard: VocabShard, method: str) -> None:
    """Token 3 of ``wrong`` has no class: its loss is NaN on every rank, and the others are as in ``right``."""
    others = torch.arange(20, device=right.targets.device) != 3
    total, *gradients = step(wrong, shard, method, reduction="sum")
    assert total.isnan()
    expected = step(right, shard, method, reduction="sum")
    assert gradients[0][others].isfinite().all()
    if shard.group.size() == 2:
        # sorted by its class the token has another place, and of three shares' sums the order depends on that
        assert torch.equal(gradients[0][others], expected[1][others])
    if method != "fused":
        losses = loss_of(wrong, leaves_of(wrong, shard), shard, method, reduction="none")
        expected = loss_of(right, leaves_of(right, shard), shard, method, reduction="none")
        assert losses[3].isnan()
        assert torch.equal(losses[others], expected[others])


@pytest.mark.parametrize("size", [2, 3])
def test_targets_that_no_rank_owns(ranks, size) -> None:
    ranks.run(check_targets_of_nobody, ranks=size)


def check_subgroup(group, device):
    if dist.get_rank() not in (1, 3):
        # has no part in any collective: the others would wait for it
        return
    inner = subgroup((1, 3))
    inputs = make_inputs(37, 24, 701, device=device, bias=True, ignored=0.2)
    shard = VocabShard.even(701, inner)
    assert shard.start == (0 if dist.get_rank() == 1 else 351)
    for plan in PLANS.values():
        results = step(inputs, shard, *plan)
        assert_loss(results[0], inputs)
        assert_sharded_gradients(*leaves_with(results, inputs, shard), shard, inputs)


def test_a_subgroup_of_a_larger_world(ranks) -> None:
    ranks.run(check_subgroup, ranks=4)


def check_pairs(group, device):
    """Each pair has its own tokens and vocabulary, and its own pace."""
    inner = subgroup((0, 1), (2, 3))
    which = dist.get_rank() // 2
    v = (300, 411)[which]
    inputs = make_inputs((20, 33)[which], 24, v, device=device, bias=True, seed=which)
    shard = VocabShard.even(v, inner)
    for plan in (*PLANS.values(), *list(PLANS.values())[: 3 * which]):
        results = step(inputs, shard, *plan)
        assert_loss(results[0], inputs)
        assert_sharded_gradients(*leaves_with(results, inputs, shard), shard, inputs)


def test_pairs_at_once(ranks) -> None:
    ranks.run(check_pairs, ranks=4)


# whose groups overlap: every rank goes through those that it belongs to in this order
OVERLAPPING = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((0, 1), (2, 3))]


def check_overlapping_groups(group, device, methods):
    heads = []
    for index, (memberships, method) in enumerate(zip(OVERLAPPING, methods, strict=True)):
        inner = subgroup(*memberships)
        seed = 10 * index + memberships.index(tuple(dist.get_process_group_ranks(inner)))
        inputs = make_inputs(20 + seed, 24, 300 + seed, device=device, bias=True, seed=seed)
        shard = VocabShard.even(300 + seed, inner)
        heads.append((inputs, shard, method, leaves_of(inputs, shard)))
    losses = [loss_of(inputs, leaves, shard, method) for inputs, shard, method, leaves in heads]
    sum(losses).backward()
    for loss, (inputs, shard, _, leaves) in zip(losses, heads, strict=True):
        assert_loss(loss.detach(), inputs)
        assert_sharded_gradients(*leaves, shard, inputs)


@pytest.mark.parametrize("methods", [4 * ["recompute"], 4 * ["fused"], ["fused", "recompute", "cached", "cached"]])
def test_groups_that_overlap(ranks, methods) -> None:
    ranks.run(check_overlapping_groups, methods, ranks=4)


def check_two_heads(group, device):
    one, two = (make_inputs(20, 24, v, device=device, bias=True, seed=v) for v in (300, 411))
    two = two._replace(hidden=one.hidden)
    shards = [VocabShard.even(300, group), VocabShard.padded(411, 64, group)]
    for methods in itertools.product(METHODS, METHODS):
        alone = [
            step(inputs, shard, method) for inputs, shard, method in zip((one, two), shards, methods, strict=True)
        ]
        hidden, *first = leaves_of(one, shards[0])
        second = rows_of(two, shards[1])
        losses = [
            loss_of(one, (hidden, *first), shards[0], methods[0]),
            loss_of(two, (hidden, *second), shards[1], methods[1]),
        ]
        (losses[0] + losses[1]).backward()
        together = f"{methods[0]} and {methods[1]} together"
        assert torch.equal(hidden.grad, alone[0][1] + alone[1][1]), together
        assert_equal([losses[0], None, *(x.grad for x in first)], [alone[0][0], None, *alone[0][2:]], together)
        assert_equal([losses[1], None, *(x.grad for x in second)], [alone[1][0], None, *alone[1][2:]], together)


@pytest.mark.parametrize("size", [2, 3])
def test_two_heads_in_one_backward(ranks, size) -> None:
    ranks.run(check_two_heads, ranks=size)


def check_several_forwards(group, device, slices):
    """Losses that nobody differentiates, and several before their backwards, as a pipeline has them."""
    batches = [make_inputs(n, 24, 701, device=device, bias=True, ignored=0.2, seed=n) for n in (37, 20)]
    shard = VocabShard.even(701, group, sequence_parallel=slices)
    for name, plan in PLANS.items():
        alone = [step(inputs, shard, *plan) for inputs in batches]
        for order in ([0, 1], [1, 0]):
            leaves = [leaves_of(inputs, shard) for inputs in batches]
            dropped = loss_of(batches[0], leaves[0], shard, *plan)
            loss_of(batches[1], leaves[1], shard, *plan)
            losses = [loss_of(inputs, mine, shard, *plan) for inputs, mine in zip(batches, leaves, strict=True)]
            for index in order:
                losses[index].backward()
            for index in order:
                results = [losses[index], *(leaf.grad for leaf in leaves[index])]
                assert_equal(results, alone[index], f"{name}, backwards in the order {order}")
            assert torch.equal(dropped, losses[0])


@pytest.mark.parametrize(("size", "slices"), [(2, False), (3, False), (2, True)])
def test_losses_without_backward_and_backwards_in_any_order(ranks, size, slices) -> None:
    ranks.run(check_several_forwards, slices, ranks=size)


def check_backward_twice(group, device):
    inputs = make_inputs(37, 24, 701, device=device, bias=True, ignored=0.2)
    shard = VocabShard.even(701, group)
    for name, plan in PLANS.items():
        leaves = leaves_of(inputs, shard)
        loss = loss_of(inputs, leaves, shard, *plan)
        gradients = []
        for again in (True, True, False):
            loss.backward(retain_graph=again)
            assert_same_bits(leaves[0].grad, group)
            assert_sharded_gradients(*leaves, shard, inputs)
            gradients.append([loss, *(leaf.grad for leaf in leaves)])
            for leaf in leaves:
                leaf.grad = None
        assert_equal(gradients[2], gradients[1], f"{name}, a third backward")
        if plan[0] != "fused":
            # which computes them by another method
            assert_equal(gradients[1], gradients[0], f"{name}, a second backward")
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("size", [2, 3])
def test_backward_twice_in_every_method(ranks, size) -> None:
    ranks.run(check_backward_twice, ranks=size)


# of a collective of the ranks below, in seconds
TIMEOUT = 5
LOST = r"Connection (closed|reset) by peer|Timed out waiting|Broken pipe|[Tt]imed? ?out"


def fail(how: str) -> None:
    if how == "raises":
        raise ValueError("on purpose")
    if how == "exits":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL if how == "is killed" else signal.SIGSTOP)


def rank_of_a_failing_step(
    rank: int, folder: str, plan: tuple[str, dict[str, int]], slices: bool, how: str, when: str
) -> None:
    """A step that is whole, and one in which rank 1 fails: before it, or instead of its first or last collective."""
    errors = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, sys.stderr.fileno())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=3)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    inputs = make_inputs(37, 24, 701, bias=True, ignored=0.2)
    shard = VocabShard.even(701, group, sequence_parallel=slices)
    calls, last = [], None

    def counting(collective):
        def counted(*args, **kwargs):
            if last is not None and rank == 1 and len(calls) == (0 if when == "first" else last):
                fail(how)
            calls.append(collective)
            return collective(*args, **kwargs)

        return counted

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, counting(getattr(dist, name)))
    step(inputs, shard, *plan)
    last = len(calls) - 1
    assert last > 1
    calls.clear()
    if when == "before" and rank == 1:
        fail(how)
    began = time.monotonic()
    try:
        step(inputs, shard, *plan)
    finally:
        print(f"{time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


@pytest.mark.skipif("RANK" in os.environ, reason="starts ranks of its own")
@pytest.mark.parametrize(
    ("plan", "slices", "how", "when"),
    [
        ("recompute", False, "is killed", "last"),
        ("recompute", False, "raises", "first"),
        ("recompute", False, "stops", "first"),
        ("cached", False, "exits", "last"),
        ("cached", False, "is killed", "before"),
        ("fused by chunks", False, "is killed", "first"),
        ("fused by chunks", False, "raises", "last"),
        ("cached", True, "is killed", "last"),
        ("fused by chunks", True, "raises", "first"),
    ],
)
def test_a_rank_that_fails_ends_the_others(tmp_path, plan, slices, how, when) -> None:
    context = process_context()
    processes = [
        context.Process(target=rank_of_a_failing_step, args=(rank, str(tmp_path), PLANS[plan], slices, how, when))
        for rank in range(3)
    ]
    try:
        for process in processes:
            process.start()
        others = processes[::2]
        for process in others:
            process.join(60)
        if how == "stops":
            assert processes[1].exitcode is None
            processes[1].kill()
        processes[1].join(60)
        texts = [Path(tmp_path, str(rank)).read_text() for rank in range(3)]
        story = "\n".join(texts)
        codes = {"raises": 1, "exits": 3}
        assert [process.exitcode for process in processes] == [1, codes.get(how, -signal.SIGKILL), 1], story
        assert ("ValueError: on purpose" in texts[1]) == (how == "raises"), story
        for text in texts[::2]:
            assert re.search(f"RuntimeError: .*({LOST})", text), story
            assert float(re.search(r"^(.*) s$", text, re.MULTILINE)[1]) < 2 * TIMEOUT, story
    finally:
        for process in processes:
            process.kill()
            process.join()
