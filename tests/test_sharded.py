"""The loss over groups of ranks. The checks run on spawned ranks, or on those of a torchrun job:
``torchrun --nproc-per-node 2 -m pytest tests/test_sharded.py``."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from inputs import IGNORED, Inputs, make_inputs, make_trained_inputs, make_upstream
from plans import forced_plan
from pool import subgroup
from shards import assert_same_bits
from tolerance import assert_gradients, assert_loss

from cce_dist import VocabShard, linear_cross_entropy
from cce_dist.autograd import second_pass
from cce_dist.parallel import agreement
from cce_dist.planner import most_slabs

LAYOUTS = ["even", "blocks", "chunked", "padded", "uneven", "empty first"]


def shard_of(layout: str, vocab_size: int, group: dist.ProcessGroup) -> VocabShard:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    match layout:
        case "even":
            return VocabShard.even(vocab_size, group)
        case "blocks":
            return VocabShard.even(vocab_size, group, multiple_of=256)
        case "chunked":
            return VocabShard.chunked(vocab_size, group)
        case "padded":
            return VocabShard.padded(vocab_size, 64, group)
        case "uneven":
            bounds = [0, *(1 + 7 * r for r in range(size - 1)), vocab_size]
        case "empty first":
            bounds = [0, *(0 for _ in range(size - 1)), vocab_size]
    return VocabShard(bounds[rank], bounds[rank + 1], vocab_size, group)


def rows_of(inputs: Inputs, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's rows of weight and bias, new leaves; NaN in the rows of padding."""

    def rows(whole):
        part = whole.new_full((shard.rows, *whole.shape[1:]), math.nan)
        part[: shard.classes] = whole.detach()[shard.start : shard.start + shard.classes]
        return part.requires_grad_()

    return rows(inputs.weight), None if inputs.bias is None else rows(inputs.bias)


def assert_sharded_gradients(hidden, weight, bias, shard, inputs, upstream=None, **options):
    """Of this rank, gathered to those of the whole: dE is complete on every rank, dC and db are its rows'."""
    real = slice(0, shard.classes)
    for rows in (weight, bias):
        if rows is not None and rows.grad is not None:
            assert (rows.grad[shard.classes :] == 0).all(), "padding has a gradient"
    parts = [None] * shard.group.size()
    mine = (
        shard.start,
        None if weight.grad is None else weight.grad[real].cpu(),
        None if bias is None or bias.grad is None else bias.grad[real].cpu(),
    )
    dist.all_gather_object(parts, mine, group=shard.group)
    # by the start and then by size: an empty shard starts where its neighbour does
    parts.sort(key=lambda part: part[0])

    def whole(index):
        rows = [part[index] for part in parts]
        return None if any(r is None for r in rows) else torch.cat(rows).to(inputs.hidden.device)

    assert_gradients([hidden.grad, whole(1), whole(2)], inputs, upstream, **options)


def check_loss_and_gradients(group, device, layout, dtype, v, spread, bias, options, method=None):
    inputs = make_inputs(45, 24, v, dtype, device=device, spread=spread, bias=bias, ignored=0.2, seed=v)
    shard = shard_of(layout, v, group)
    hidden, (weight, local_bias) = inputs.hidden.detach().requires_grad_(), rows_of(inputs, shard)
    loss = linear_cross_entropy(
        hidden, weight, inputs.targets, bias=local_bias, shard=shard, method=method, **options
    )
    assert_loss(loss.detach(), inputs, **options)
    assert_same_bits(loss, group)
    upstream = make_upstream(loss)
    loss.backward(upstream)
    assert_same_bits(hidden.grad, group)
    assert_sharded_gradients(hidden, weight, local_bias, shard, inputs, upstream, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(ranks, layout, size) -> None:
    ranks.run(check_loss_and_gradients, layout, torch.float32, 701, 1.0, True, {}, ranks=size)


@pytest.mark.parametrize("layout", LAYOUTS)
# of 300 classes an even share is less than a tile, and the first rank of "blocks" has a whole one
@pytest.mark.parametrize("v", [300, 701])
@pytest.mark.parametrize("method", ["recompute", "cached", "fused"])
def test_every_method_as_planned(ranks, layout, v, method) -> None:
    """The plan is that of an even share of the vocabulary, whatever a rank holds."""
    ranks.run(check_loss_and_gradients, layout, torch.float32, v, 1.0, True, {}, method, ranks=2)


@pytest.mark.parametrize("layout", ["even", "padded"])
@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "none"}, {"denominator": 99}], ids=str)
def test_options(ranks, layout, options) -> None:
    ranks.run(check_loss_and_gradients, layout, torch.float32, 701, 1.0, True, options, ranks=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(ranks, dtype) -> None:
    ranks.run(check_loss_and_gradients, "even", dtype, 701, 1.0, True, {}, ranks=4)


@pytest.mark.parametrize(
    ("v", "spread", "bias"),
    [(2, 1.0, False), (5, 0.01, -30.0), (5, 0.01, -200.0), (1023, 0.01, -30.0), (77, 20.0, True)],
)
@pytest.mark.parametrize("layout", ["chunked", "padded"])
def test_small_vocabularies_and_phantom_columns(ranks, layout, v, spread, bias) -> None:
    ranks.run(check_loss_and_gradients, layout, torch.float32, v, spread, bias, {}, ranks=4)


@pytest.mark.parametrize("layout", ["even", "padded", "empty first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_interpreted_kernels(ranks, layout, dtype) -> None:
    ranks.run(check_loss_and_gradients, layout, dtype, 133, 1.0, True, {}, ranks=2, interpret=True)


def check_bits_of_one_device(group, device, v, layout, unit, methods):
    inputs = make_inputs(37, 24, v, device=device, bias=True, ignored=0.2)
    shard = VocabShard.even(v, group, multiple_of=unit) if layout == "blocks" else VocabShard.padded(v, unit, group)
    weight, bias = rows_of(inputs, shard)
    for method in methods:
        for reduction in ("mean", "sum", "none") if method != "fused" else ("mean", "sum"):
            one = linear_cross_entropy(*inputs[:3], bias=inputs.bias, reduction=reduction, method="recompute")
            with forced_plan(kept=256, chunk=16):
                many = linear_cross_entropy(
                    inputs.hidden, weight, inputs.targets, bias=bias, shard=shard, reduction=reduction, method=method
                )
            assert torch.equal(one, many), f"{method}, {reduction}: the loss depends on the group's size"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["blocks", "padded"])
def test_the_loss_has_the_same_bits_for_every_group_size(ranks, layout, size) -> None:
    ranks.run(check_bits_of_one_device, 2100, layout, 256, ["recompute", "cached", "fused"], ranks=size)


def test_the_interpreted_loss_has_the_same_bits(ranks) -> None:
    ranks.run(check_bits_of_one_device, 300, "blocks", 64, ["cached", "fused"], ranks=2, interpret=True)


# chunks of 32 tokens, the last one short; columns that are kept beside others that are not, on some ranks alone
KEEPING = {
    "cached all": ("cached", {"kept": 1 << 20}),
    "cached some": ("cached", {"kept": 256, "panel": 256, "wide": 0, "rows": 32}),
    "cached lent": (
        "cached",
        {"kept": 512, "lent": 256, "slab": 256, "part": 32, "panel": 256, "wide": 0, "rows": 32},
    ),
    "fused whole": ("fused", {"chunk": 1 << 20}),
    "fused chunks": ("fused", {"chunk": 32}),
}


def check_method(group, device, layout, dtype, v, method, fields, n=70, d=24):
    if dtype == torch.bfloat16:
        inputs = make_trained_inputs(300, 64, v, dtype, device=device, bias=True, ignored=0.2)
    else:
        inputs = make_inputs(n, d, v, dtype, device=device, bias=True, ignored=0.2)
    shard = shard_of(layout, v, group)
    with torch.no_grad():
        inputs.hidden[inputs.targets == IGNORED] = math.nan
        if dtype != torch.bfloat16:
            # one row whose logits lie far above its target's, on one rank alone
            away = inputs.weight[-1]
            inputs.hidden[5], inputs.targets[5] = 200 * away / away.square().sum(), 0
    hidden, (weight, bias) = inputs.hidden.detach().requires_grad_(), rows_of(inputs, shard)
    yardstick = "output" if dtype == torch.bfloat16 else "operands"
    base = linear_cross_entropy(
        hidden, weight, inputs.targets, bias=bias, shard=shard, reduction="sum", method="recompute"
    )
    with forced_plan(**fields):
        losses = linear_cross_entropy(
            hidden, weight, inputs.targets, bias=bias, shard=shard, reduction="sum", method=method
        )
        assert torch.equal(losses, base), "the loss depends on the method"
        assert_same_bits(losses, group)
        for factor in (-1.7, 65536.0):
            # a second backward computes fused gradients anew, in which all ranks take part
            hidden.grad = weight.grad = bias.grad = None
            upstream = torch.tensor(factor, device=device)
            losses.backward(upstream, retain_graph=True)
            assert_same_bits(hidden.grad.nan_to_num(), group)
            assert_sharded_gradients(
                hidden, weight, bias, shard, inputs, upstream, yardstick=yardstick, reduction="sum"
            )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["padded", "uneven", "empty first"])
@pytest.mark.parametrize("plan", ["cached some", "fused chunks"])
def test_methods(ranks, plan, layout, size) -> None:
    ranks.run(check_method, layout, torch.float32, 1101, *KEEPING[plan], ranks=size)


def check_frozen_ranks_keep_as_much(group, device):
    """A rank without a gradient of the classifier keeps in memory of its own what the others keep in that."""
    inputs = make_inputs(70, 64, 2802, device=device, ignored=0.2)
    shard, computed = VocabShard.even(2802, group), []
    weight, _ = rows_of(inputs, shard)
    weight.requires_grad_(dist.get_rank(group) > 0)
    with pytest.MonkeyPatch.context() as patch, forced_plan(**KEEPING["cached lent"][1]):
        again = second_pass.panel_gradient
        patch.setattr(
            second_pass,
            "panel_gradient",
            lambda *args, **options: (computed.append(args[5]), again(*args, **options)),
        )
        loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, shard=shard, method="cached")
        loss.backward()
    blocks = -(-80 // 32)
    assert sum(panel.shape[1] for panel in computed) == blocks * (shard.classes - 512)
    assert_sharded_gradients(inputs.hidden, weight, None, shard, inputs)


def test_frozen_ranks_keep_as_much(ranks) -> None:
    ranks.run(check_frozen_ranks_keep_as_much, ranks=2)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", ["padded", "uneven", "empty first"])
def test_memory_of_the_gradient_that_some_ranks_have(ranks, layout, size) -> None:
    # that of one of three equal shares is too small for a slab
    assert [most_slabs(96, 64, 1401 // share, 256) for share in (1, 2, 3)] == [2, 1, 0]
    ranks.run(check_method, layout, torch.float32, 1401, *KEEPING["cached lent"], 70, 64, ranks=size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("plan", KEEPING)
def test_methods_in_other_dtypes(ranks, plan, dtype) -> None:
    ranks.run(check_method, "even", dtype, 1101, *KEEPING[plan], ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", KEEPING)
@pytest.mark.parametrize("v", [3, 257, 1024])
def test_methods_by_every_layout(ranks, plan, layout, size, v) -> None:
    if layout == "uneven" and v < 1 + 7 * (size - 1):
        pytest.skip("fewer classes than the layout's first ranks hold")
    ranks.run(check_method, layout, torch.float32, v, *KEEPING[plan], ranks=size)


@pytest.mark.parametrize(("plan", "layout"), [("cached some", "padded"), ("fused chunks", "empty first")])
def test_interpreted_methods(ranks, plan, layout) -> None:
    ranks.run(check_method, layout, torch.float32, 601, *KEEPING[plan], 40, ranks=2, interpret=True)


def check_two_groups_at_once(group, device):
    inner = subgroup((0, 2), (1, 3))
    which = dist.get_rank() % 2
    v = (300, 411)[which]
    inputs = make_inputs((20, 33)[which], 24, v, device=device, seed=which)
    shard = VocabShard.even(v, inner)
    assert shard.start == (0 if dist.get_rank() < 2 else -(-v // 2))
    weight, _ = rows_of(inputs, shard)
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, shard=shard)
    assert_loss(loss.detach(), inputs)
    loss.backward()
    assert_sharded_gradients(inputs.hidden, weight, None, shard, inputs)
    # no group is one rank, whatever is initialised
    plain = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets)
    assert_loss(plain.detach(), inputs)


def test_two_groups_in_one_world(ranks) -> None:
    ranks.run(check_two_groups_at_once, ranks=4)


def check_frozen(group, device, frozen):
    inputs = make_inputs(20, 24, 300, device=device, bias=True)
    shard = VocabShard.even(300, group)
    weight, bias = rows_of(inputs, shard)
    hidden = inputs.hidden.detach().requires_grad_(frozen != "hidden")
    if frozen == "everything else" or (frozen == "weight of rank 0" and dist.get_rank(group) == 0):
        weight.requires_grad_(False)
        bias.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, inputs.targets, bias=bias, shard=shard)
    loss.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (not weight.requires_grad)
    assert_sharded_gradients(hidden, weight, bias, shard, inputs)


@pytest.mark.parametrize("frozen", ["hidden", "weight of rank 0", "everything else"])
def test_frozen_on_some_ranks(ranks, frozen) -> None:
    ranks.run(check_frozen, frozen, ranks=3)


def check_no_tokens(group, device, n):
    inputs = make_inputs(n, 24, 300, device=device, bias=True, ignored=1.1)
    shard = VocabShard.chunked(300, group)
    weight, bias = rows_of(inputs, shard)
    with torch.no_grad():
        inputs.hidden.fill_(math.nan)
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, bias=bias, shard=shard)
    loss.backward()
    for tensor in (loss, inputs.hidden.grad, weight.grad, bias.grad):
        assert (tensor == 0).all()


@pytest.mark.parametrize("n", [0, 9])
def test_no_tokens(ranks, n) -> None:
    ranks.run(check_no_tokens, n, ranks=3)


def check_poison_stays_in_its_row(group, device):
    inputs = make_inputs(20, 24, 300, device=device)
    shard = VocabShard.even(300, group)
    weight, _ = rows_of(inputs, shard)
    with torch.no_grad():
        inputs.hidden[3] = math.nan
        inputs.hidden[7] = math.inf
        inputs.targets[5] = IGNORED
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, shard=shard, reduction="none")
    assert loss.isnan().nonzero().flatten().tolist() == [3, 7]
    assert_same_bits(loss.nan_to_num(nan=-1.0), group)
    if dist.get_rank(group) == 0:
        # one rank's weight alone is spoilt: every rank must learn of it
        with torch.no_grad():
            weight[2, 0] = math.nan
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, shard=shard, reduction="none")
    assert loss[inputs.targets != IGNORED].isnan().all()


def test_nan_reaches_every_rank(ranks) -> None:
    ranks.run(check_poison_stays_in_its_row, ranks=3)


def check_agreement_is_remembered(group, device):
    # as on a GPU, where a group compares once. 701 rows over 4 ranks: both layouts give the first rank 0 to 176, and
    # the others different rows
    inputs = make_inputs(20, 24, 701, device=device)
    patch = pytest.MonkeyPatch()
    compared = []
    gather = dist.all_gather_object
    try:
        patch.setattr(agreement, "_comparing_waits", lambda device: True)
        patch.setattr(dist, "all_gather_object", lambda *a, **k: (compared.append(1), gather(*a, **k)))
        for layout in ("even", "chunked"):
            shard = shard_of(layout, 701, group)
            weight, _ = rows_of(inputs, shard)
            for _ in range(3):
                loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, shard=shard)
            assert_loss(loss.detach(), inputs)
        assert len(compared) == 2
        # another shape is compared again
        linear_cross_entropy(inputs.hidden[:5], weight, inputs.targets[:5], shard=shard)
        assert len(compared) == 3
    finally:
        patch.undo()


def test_what_ranks_agreed_on_is_remembered_by_all_or_none(ranks) -> None:
    ranks.run(check_agreement_is_remembered, ranks=4)
