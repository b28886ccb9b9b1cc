"""What callers get wrong: errors that name the argument and both values, on every rank, and nothing hangs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from inputs import make_inputs
from tolerance import assert_loss

from cce_dist import (
    LinearCrossEntropyLoss,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    VocabShard,
    linear_cross_entropy,
)


def _t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


_IDS = torch.zeros(4, dtype=torch.int64)
# name -> (arguments that replace good ones, the error, what it says)
MISTAKES = {
    "hidden is no tensor": ({"hidden": [1.0]}, TypeError, "hidden must be a tensor, got list"),
    "weight is no tensor": ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
    "targets is no tensor": ({"targets": [0, 1, 2, 3]}, TypeError, "targets must be a tensor, got list"),
    "bias is no tensor": ({"bias": 0.0}, TypeError, "bias must be a tensor, got float"),
    "hidden is a scalar": ({"hidden": _t()}, ValueError, r"hidden must have the shape [..., D], got a scalar"),
    "hidden of another width": (
        {"hidden": _t(4, 7)},
        ValueError,
        "weight must have the shape [V, 7] for hidden (4, 7), got (10, 8)",
    ),
    "no features": (
        {"hidden": _t(4, 0), "weight": _t(10, 0)},
        ValueError,
        "hidden must have at least one feature, got the shape (4, 0)",
    ),
    "flat weight": ({"weight": _t(80)}, ValueError, "weight must have the shape [V, 8], got (80,). ZeRO-3 and FSDP"),
    "gathered-away weight": (
        {"weight": _t(0)},
        ValueError,
        "weight must have the shape [V, 8], got (0,). ZeRO-3 and FSDP",
    ),
    "weight without rows": (
        {"weight": _t(0, 8)},
        ValueError,
        "weight must hold at least one class, got (0, 8). ZeRO-3 and FSDP",
    ),
    "transposed weight": (
        {"weight": _t(8, 10)},
        ValueError,
        "weight must have the shape [V, 8] for hidden (4, 8), got (8, 10)",
    ),
    "more targets": (
        {"targets": torch.zeros(5, dtype=torch.int64)},
        ValueError,
        "targets must have the shape (4,) of hidden (4, 8) without its last dimension, got (5,)",
    ),
    "targets of another layout": (
        {"hidden": _t(2, 3, 8), "targets": torch.zeros(3, 2, dtype=torch.int64)},
        ValueError,
        "targets must have the shape (2, 3) of hidden (2, 3, 8) without its last dimension, got (3, 2)",
    ),
    "flat targets": (
        {"hidden": _t(2, 3, 8), "targets": torch.zeros(6, dtype=torch.int64)},
        ValueError,
        "targets must have the shape (2, 3)",
    ),
    "integer hidden": (
        {"hidden": _t(4, 8, dtype=torch.int64)},
        TypeError,
        "hidden must be float32, bfloat16, float16 or float64, got torch.int64",
    ),
    "weight of another dtype": (
        {"weight": _t(10, 8, dtype=torch.bfloat16)},
        TypeError,
        "weight is torch.bfloat16, hidden torch.float32: expected one dtype",
    ),
    "bias of another dtype": (
        {"bias": _t(10, dtype=torch.float16)},
        TypeError,
        "bias is torch.float16, hidden torch.float32: expected one dtype",
    ),
    "bias of another length": (
        {"bias": _t(9)},
        ValueError,
        "bias must have the shape (10,) of weight's rows, got (9,)",
    ),
    "float targets": ({"targets": _t(4)}, TypeError, "targets must be int64 or int32 class ids, got torch.float32"),
    "another device": (
        {"weight": torch.zeros(10, 8, device="meta")},
        ValueError,
        "weight is on meta, hidden on cpu: expected one device",
    ),
    "unknown reduction": (
        {"reduction": "avg"},
        ValueError,
        "reduction must be one of 'mean', 'sum', 'none', got 'avg'",
    ),
    "ignore_index is a float": ({"ignore_index": -100.0}, TypeError, "ignore_index must be an int, got float"),
    "ignore_index is None": ({"ignore_index": None}, TypeError, "ignore_index must be an int, got NoneType"),
    "denominator of a sum": (
        {"reduction": "sum", "denominator": 3},
        ValueError,
        "denominator takes part in reduction 'mean' alone, got reduction 'sum'",
    ),
    "denominator of zero": ({"denominator": 0}, ValueError, "denominator must be above 0, got 0"),
    "denominator of NaN": ({"denominator": float("nan")}, ValueError, "denominator must be above 0, got nan"),
    "denominator per token": (
        {"denominator": _t(4)},
        ValueError,
        "denominator must be a number or a 0-d tensor, got shape (4,)",
    ),
    "denominator is a word": (
        {"denominator": "4"},
        TypeError,
        "denominator must be a number or a 0-d tensor, got str",
    ),
    "unknown method": (
        {"method": "fuse"},
        ValueError,
        "method must be None or one of recompute, cached, fused; got 'fuse'",
    ),
    "method is a list": (
        {"method": ["fused"]},
        ValueError,
        "method must be None or one of recompute, cached, fused; got ['fused']",
    ),
    "fused per token": (
        {"method": "fused", "reduction": "none"},
        ValueError,
        'with reduction "none" use "cached" or "recompute"',
    ),
    "cached in float16": (
        {"method": "cached", "hidden": _t(4, 8, dtype=torch.float16), "weight": _t(10, 8, dtype=torch.float16)},
        ValueError,
        'method "cached" keeps exponentials, for which float16 has no range: use "recompute"',
    ),
    "fused in float16": (
        {"method": "fused", "hidden": _t(4, 8, dtype=torch.float16), "weight": _t(10, 8, dtype=torch.float16)},
        ValueError,
        'method "fused" keeps exponentials, for which float16 has no range: use "recompute"',
    ),
    "budget is a float": (
        {"memory_budget": 1e9},
        TypeError,
        'memory_budget must be bytes, "min" or None, got float',
    ),
    "budget is true": ({"memory_budget": True}, TypeError, 'memory_budget must be bytes, "min" or None, got bool'),
    "budget is a word": (
        {"memory_budget": "max"},
        ValueError,
        "memory_budget must be bytes, \"min\" or None, got 'max'",
    ),
    "negative budget": ({"memory_budget": -1}, ValueError, "memory_budget must not be negative, got -1"),
    "budget that nothing fits": (
        {"memory_budget": 10, "hidden": _t(4, 8).requires_grad_()},
        ValueError,
        "memory_budget: nothing fits 10 bytes of workspace; ",
    ),
    "budget that a method does not fit": (
        {"memory_budget": 10, "method": "fused", "hidden": _t(4, 8).requires_grad_()},
        ValueError,
        "memory_budget: nothing fits 10 bytes of workspace; fused needs ",
    ),
    "shard is a pair": ({"shard": (0, 10)}, TypeError, "shard must be a VocabShard, got tuple"),
    "shard of another size": (
        {"shard": VocabShard(0, 12, 11)},
        ValueError,
        "weight must hold the 12 rows 0 to 12 of its shard, got 10 rows",
    ),
    "target past the end": (
        {"targets": torch.tensor([0, 1, 10, 3])},
        IndexError,
        "targets must lie in [0, 10) or be ignore_index -100, got 10",
    ),
    "negative target": (
        {"targets": torch.tensor([0, -1, 1, 3])},
        IndexError,
        "targets must lie in [0, 10) or be ignore_index -100, got -1",
    ),
}


def good_arguments() -> dict[str, object]:
    return {"hidden": _t(4, 8), "weight": _t(10, 8), "targets": _IDS.clone()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_device(mistake) -> None:
    changes, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=re.escape(message)):
        linear_cross_entropy(**{**good_arguments(), **changes})


def assert_usable(group, device):
    """Mistakes leave nothing behind: the next call is right."""
    inputs = make_inputs(6, 8, 20, device=device)
    shard = VocabShard.even(20, group)
    weight = inputs.weight.detach()[shard.start : shard.stop].requires_grad_()
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, shard=shard)
    assert_loss(loss.detach(), inputs)
    loss.backward()


def check_raises(group, device, mistakes, only):
    """Each of ``mistakes``, made on every rank or on the rank ``only``."""
    shard = VocabShard.even(20, group)
    for name in mistakes:
        changes, error, message = MISTAKES[name]
        arguments = {
            "hidden": torch.zeros(4, 8, device=device),
            "weight": torch.zeros(shard.rows, 8, device=device),
            "targets": _IDS.to(device),
            "shard": shard,
        }
        if only is None or dist.get_rank(group) == only:
            moved = {
                k: x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
                for k, x in changes.items()
            }
            arguments.update(moved)
        # the shard has other numbers of rows than the message of one device
        expected = re.escape(message) if only is None else ""
        if only is not None and dist.get_rank(group) != only:
            expected = f"^rank {only} of the group"
        with pytest.raises(error, match=expected):
            linear_cross_entropy(**arguments)
        assert_usable(group, device)


# the weight of a shard has other numbers of rows, and the shard itself is an argument
_SHARDED = [
    name
    for name, (changes, *_) in MISTAKES.items()
    if "shard" not in changes and name not in ("bias of another length", "weight without rows")
    and not ("target" in name and name.endswith(("end", "target")))
    and "device" not in name
]  # fmt: skip


def test_mistakes_of_all_ranks(ranks) -> None:
    sized = [name for name in _SHARDED if "(10" not in MISTAKES[name][2]]
    assert len(sized) > 15
    ranks.run(check_raises, sized, None, ranks=2)


@pytest.mark.parametrize("only", [0, 2])
def test_mistakes_of_one_rank_raise_on_all(ranks, only) -> None:
    ranks.run(check_raises, _SHARDED, only, ranks=3)


def check_disagreement(group, device):
    rank = dist.get_rank(group)
    shard = VocabShard.even(20, group)

    def call(n=4, d=8, dtype=torch.float32, shard=shard, rows=None, targets=None, bias=None, grad=False, **options):
        rows = shard.rows if rows is None else rows
        hidden = torch.zeros(n, d, dtype=dtype, device=device, requires_grad=grad)
        weight = torch.zeros(rows, d, dtype=dtype, device=device)
        ids = torch.zeros(n, dtype=torch.int64, device=device) if targets is None else targets
        linear_cross_entropy(hidden, weight, ids, shard=shard, bias=bias, **options)

    last = group.size() - 1
    odd = rank == last

    def expect(error, *parts, **arguments):
        with pytest.raises(error) as caught:
            call(**arguments)
        for part in parts:
            assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
        assert_usable(group, device)

    expect(ValueError, "the shape of hidden", "rank 0 has (4, 8)", f"rank {last} (5, 8)", n=5 if odd else 4)
    expect(ValueError, "the shape of hidden", "rank 0 has (4, 8)", f"rank {last} (4, 6)", d=6 if odd else 8)
    expect(
        ValueError, "the dtype of hidden", "torch.float32", f"rank {last} torch.bfloat16",
        dtype=torch.bfloat16 if odd else torch.float32,
    )  # fmt: skip
    expect(ValueError, "requires_grad of hidden", "rank 0 has False", f"rank {last} True", grad=odd)
    expect(ValueError, "ignore_index", "rank 0 has -100", f"rank {last} -1", ignore_index=-1 if odd else -100)
    expect(ValueError, "method", "rank 0 has None", f"rank {last} recompute", method="recompute" if odd else None)
    expect(ValueError, "method", "rank 0 has fused", f"rank {last} cached", method="cached" if odd else "fused")
    expect(ValueError, "memory_budget", "rank 0 has None", f"rank {last} min", memory_budget="min" if odd else None)
    expect(
        ValueError, "memory_budget", "rank 0 has 1000000", f"rank {last} 2000000",
        memory_budget=2000000 if odd else 1000000,
    )  # fmt: skip
    expect(
        ValueError, "whether reduction is none", "rank 0 has False", f"rank {last} True",
        reduction="none" if odd else "mean",
    )  # fmt: skip
    expect(ValueError, "presence of bias", bias=torch.zeros(shard.rows, device=device) if odd else None)
    # bounds: a gap, an overlap, another vocabulary, rows that nobody holds
    short = VocabShard(shard.start, shard.stop - 1, 20, group) if rank == 0 else shard
    expect(
        ValueError,
        "must tile the vocabulary of 20",
        f"0:{20 // group.size() + (20 % group.size() > 0) - 1}",
        shard=short,
    )
    longer = VocabShard(shard.start, shard.stop + 1, 20, group) if rank == 0 else shard
    expect(ValueError, "must tile the vocabulary of 20", shard=longer)
    missing = VocabShard(shard.start, shard.stop - 1, 20, group) if odd else shard
    expect(ValueError, "must tile the vocabulary of 20", shard=missing)
    expect(
        ValueError,
        "vocab_size",
        "rank 0 has 20",
        f"rank {last} 21",
        shard=VocabShard(shard.start, shard.stop, 21, group) if odd else shard,
    )
    # the whole weight on each rank
    expect(ValueError, "whole vocabulary: pass this rank's rows", rows=20)
    expect(ValueError, "must tile the vocabulary of 20", shard=VocabShard(0, 20, 20, group))
    if device.type == "cpu":
        wrong = torch.full((4,), 20, device=device) if odd else None
        expect(IndexError, "targets must lie in [0, 20)", "got 20", targets=wrong)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree(ranks, size) -> None:
    ranks.run(check_disagreement, ranks=size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, 0), "vocab_size must be at least 1, got 0"),
        ((0, 10, 2**31 - 1), "vocab_size must be below 2**31 - 1, got 2147483647"),
        ((5, 4, 10), "bounds must be 0 <= start <= stop, got 5 and 4"),
        ((-1, 4, 10), "bounds must be 0 <= start <= stop, got -1 and 4"),
        ((0, 9, 10), "rows 0 to 9 are not the whole vocabulary of 10; pass the process group"),
    ],
)
def test_shards(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        VocabShard(*arguments)


@pytest.mark.parametrize("make", [VocabShard.even, VocabShard.padded])
def test_shards_of_nothing(make) -> None:
    with pytest.raises(ValueError, match="multiple_of must be at least 1, got 0"):
        make(10, multiple_of=0)


def test_modules() -> None:
    with pytest.raises(TypeError, match=re.escape("unknown options ['smoothing']; linear_cross_entropy has")):
        LinearCrossEntropyLoss(smoothing=0.1)
    with pytest.raises(ValueError, match="shard is of a vocabulary of 11, expected vocab_size 10"):
        VocabParallelLMHead(8, 10, shard=VocabShard.even(11))
    with pytest.raises(ValueError, match=re.escape("weight must have the shape (10, 8) of the shard, got (9, 8)")):
        VocabParallelEmbedding(8, 10, weight=torch.nn.Parameter(_t(9, 8)))
    with pytest.raises(ValueError, match="max_norm, scale_grad_by_freq and sparse"):
        VocabParallelEmbedding.from_embedding(torch.nn.Embedding(10, 8, max_norm=1.0))
    with pytest.raises(IndexError, match=re.escape("ids must lie in [0, 10), got 10")):
        VocabParallelEmbedding(8, 10)(torch.tensor([3, 10]))
    with pytest.raises(ValueError, match=re.escape("tensor must hold the shard's 10 rows, got the shape (9, 8)")):
        VocabShard.even(10).checkpoint_view(_t(9, 8))


@pytest.mark.parametrize("method", ["recompute", "cached"])
def test_a_weight_that_is_gone_in_backward(method) -> None:
    """As a gather that ended with the loss leaves it."""
    inputs = make_inputs(8, 4, 20)
    weight = torch.nn.Parameter(inputs.weight.detach())
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, method=method)
    weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"weight has the shape \(0,\) in backward"):
        loss.backward()
