"""DTensors in and out of the loss, the head as a parallel style, and the loss under FSDP, DDP and checkpointing. The
checks run on spawned ranks, or on those of a torchrun job."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from inputs import IGNORED, make_inputs, make_upstream
from plans import forced_plan
from pool import subgroup
from shards import assert_same_bits
from tolerance import FP64, assert_gradients, assert_loss
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cce_dist import (
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabParallelLMHead,
    VocabShard,
    linear_cross_entropy,
    reference,
)
from cce_dist.parallel import agreement

# where a GPU would take no fp64, these compare the layouts of CPUs alone
CPU = torch.device("cpu")
METHODS = ["recompute", "cached", "fused"]


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("tp",))


def square_mesh(device: torch.device) -> DeviceMesh:
    """Two data-parallel ranks by two tensor-parallel ones."""
    groups = [subgroup((0, 2), (1, 3)), subgroup((0, 1), (2, 3))]
    return DeviceMesh.from_group(groups, device.type, mesh=[[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))


def spread(whole: torch.Tensor, mesh: DeviceMesh, *placements) -> DTensor:
    """A new leaf."""
    leaf = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
    return leaf.requires_grad_(whole.requires_grad)


def assert_placed(gradient: torch.Tensor, *placements) -> None:
    assert isinstance(gradient, DTensor)
    assert gradient.placements == placements


def check_weight(group, device, v, hidden_is_dtensor, options, method=None):
    inputs = make_inputs(45, 24, v, device=device, bias=True, ignored=0.2)
    mesh = mesh_of(group, device)
    hidden = inputs.hidden.detach().requires_grad_()
    targets = inputs.targets
    if hidden_is_dtensor:
        hidden, targets = spread(inputs.hidden, mesh, Replicate()), spread(targets, mesh, Replicate())
    weight, bias = spread(inputs.weight, mesh, Shard(0)), spread(inputs.bias, mesh, Shard(0))
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, method=method, **options)
    assert type(loss) is torch.Tensor
    assert_loss(loss.detach(), inputs, **options)
    assert_same_bits(loss, group)
    upstream = make_upstream(loss)
    loss.backward(upstream)
    assert_placed(weight.grad, Shard(0))
    assert_placed(bias.grad, Shard(0))
    assert weight.grad.to_local().shape == weight.to_local().shape
    if hidden_is_dtensor:
        assert_placed(hidden.grad, Replicate())
    else:
        assert type(hidden.grad) is torch.Tensor
    d_hidden = hidden.grad.to_local() if hidden_is_dtensor else hidden.grad
    assert_same_bits(d_hidden, group)
    assert_gradients([d_hidden, weight.grad.full_tensor(), bias.grad.full_tensor()], inputs, upstream, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("hidden_is_dtensor", [False, True], ids=["plain", "replicated"])
# 5 rows over 4 ranks: 2, 2, 1 and none
@pytest.mark.parametrize("v", [5, 701])
def test_a_sharded_weight_implies_the_shard(ranks, v, hidden_is_dtensor, size) -> None:
    ranks.run(check_weight, v, hidden_is_dtensor, {}, ranks=size)


@pytest.mark.parametrize(
    ("reduction", "method"), [("none", None), ("sum", "recompute"), ("sum", "cached"), ("mean", "fused")]
)
def test_reductions_and_methods_with_dtensors(ranks, reduction, method) -> None:
    ranks.run(check_weight, 701, True, {"reduction": reduction}, method, ranks=2)


def check_autocast_and_frozen(group, device):
    inputs = make_inputs(45, 24, 301, device=device, ignored=0.2)
    mesh = mesh_of(group, device)
    hidden, weight = spread(inputs.hidden, mesh, Replicate()), spread(inputs.weight, mesh, Shard(0))
    with torch.no_grad():
        assert_loss(linear_cross_entropy(hidden, weight, inputs.targets), inputs)
    rounded = inputs._replace(hidden=inputs.hidden.detach().bfloat16(), weight=inputs.weight.detach().bfloat16())
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, inputs.targets)
    assert_loss(loss.detach(), rounded)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    gradients = [hidden.grad.full_tensor().bfloat16(), weight.grad.full_tensor().bfloat16(), None]
    assert_gradients(gradients, rounded)
    weight.requires_grad_(False)
    weight.grad = hidden.grad = None
    linear_cross_entropy(hidden, weight, inputs.targets).backward()
    assert weight.grad is None
    assert_gradients([hidden.grad.full_tensor(), None, None], inputs)


def test_autocast_and_frozen_dtensors(ranks) -> None:
    ranks.run(check_autocast_and_frozen, ranks=2)


def check_square_mesh(group, device, layout):
    """The weight whole along dp: the same tokens there, or others."""
    inputs = make_inputs(44, 24, 301, device=device, bias=True, ignored=0.2)
    mesh = square_mesh(device)
    weight = spread(inputs.weight, mesh, Replicate(), Shard(0))
    bias = spread(inputs.bias, mesh, Replicate(), Shard(0))
    if layout == "other tokens":
        hidden = spread(inputs.hidden, mesh, Shard(0), Replicate())
        targets = spread(inputs.targets, mesh, Shard(0), Replicate())
    elif layout == "the same tokens":
        hidden, targets = spread(inputs.hidden, mesh, Replicate(), Replicate()), inputs.targets
    else:
        hidden, targets = inputs.hidden.detach().requires_grad_(), inputs.targets
    count = int((inputs.targets != IGNORED).sum())
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, denominator=count)
    loss.backward()
    along_dp = Partial() if layout == "other tokens" else Replicate()
    assert_placed(weight.grad, along_dp, Shard(0))
    assert_placed(bias.grad, along_dp, Shard(0))
    total = loss.detach().clone()
    if layout == "other tokens":
        dist.all_reduce(total, group=mesh.get_group("dp"))
    assert_loss(total, inputs, denominator=count)
    assert_same_bits(total, group)
    d_hidden = hidden.grad
    if isinstance(hidden, DTensor):
        assert_placed(d_hidden, *hidden.placements)
        d_hidden = d_hidden.full_tensor()
    gradients = [d_hidden, weight.grad.full_tensor(), bias.grad.full_tensor()]
    assert_gradients(gradients, inputs, denominator=count)


@pytest.mark.parametrize("layout", ["plain", "the same tokens", "other tokens"])
def test_one_axis_of_a_mesh(ranks, layout) -> None:
    ranks.run(check_square_mesh, layout, ranks=4)


def check_plain_weight_and_its_shard(group, device):
    inputs = make_inputs(20, 24, 301, device=device)
    mesh = mesh_of(group, device)
    hidden = spread(inputs.hidden, mesh, Replicate())
    head = VocabParallelLMHead(24, 301, group=group, device=device)
    with torch.no_grad():
        head.weight.copy_(inputs.weight[head.shard.start : head.shard.stop])
    loss = head.loss(hidden, inputs.targets)
    assert_loss(loss.detach(), inputs)
    loss.backward()
    assert_placed(hidden.grad, Replicate())
    assert type(head.weight.grad) is torch.Tensor
    parts = [None] * group.size()
    dist.all_gather_object(parts, head.weight.grad.cpu(), group=group)
    assert_gradients([hidden.grad.to_local(), torch.cat(parts).to(device), None], inputs)


def test_a_plain_weight_with_its_shard_takes_dtensors(ranks) -> None:
    ranks.run(check_plain_weight_and_its_shard, ranks=3)


def check_unfinished(group, device):
    """Hidden states that a collective may still be writing, as RowwiseParallel returns them."""
    inputs = make_inputs(20, 24, 301, device=device)
    mesh = mesh_of(group, device)
    whole = inputs.hidden.detach().requires_grad_()
    hidden = DTensor.from_local(whole / group.size(), mesh, (Partial(),), run_check=False)
    hidden = hidden.redistribute(placements=(Replicate(),), async_op=True).to_local()
    assert type(hidden) is not torch.Tensor
    weight = spread(inputs.weight, mesh, Shard(0))
    loss = linear_cross_entropy(hidden, weight, inputs.targets)
    assert type(loss) is torch.Tensor
    assert_loss(loss.detach(), inputs)
    loss.backward()
    assert_gradients([whole.grad * group.size(), weight.grad.full_tensor(), None], inputs)


def test_hidden_states_that_are_still_on_their_way(ranks) -> None:
    ranks.run(check_unfinished, ranks=2)


def check_implied_shard(group, device, v):
    mesh = mesh_of(group, device)
    weight = distribute_tensor(torch.zeros(v, 8, device=device), mesh, [Shard(0)], src_data_rank=None)
    shard = VocabShard.from_dtensor(weight)
    assert shard == VocabShard.chunked(v, group)
    assert shard.rows == len(weight.to_local())
    again = distribute_tensor(torch.ones(v, 8, device=device), mesh, [Shard(0)], src_data_rank=None)
    assert VocabShard.from_dtensor(again) is shard
    with pytest.raises(TypeError, match="weight must be a DTensor, got Tensor"):
        VocabShard.from_dtensor(torch.zeros(v, 8))


@pytest.mark.parametrize("v", [3, 8, 701])
def test_the_implied_shard(ranks, v) -> None:
    ranks.run(check_implied_shard, v, ranks=4)


def check_compared_once(group, device):
    # as on a GPU, where a group compares once for a shard and shapes
    inputs = make_inputs(20, 24, 507, device=device)
    mesh = mesh_of(group, device)
    compared = []
    gather = dist.all_gather_object
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_comparing_waits", lambda device: True)
        patch.setattr(dist, "all_gather_object", lambda *a, **k: (compared.append(1), gather(*a, **k)))
        for _ in range(3):
            weight = spread(inputs.weight, mesh, Shard(0))
            loss = linear_cross_entropy(spread(inputs.hidden, mesh, Replicate()), weight, inputs.targets)
    assert_loss(loss.detach(), inputs)
    assert len(compared) == 1


def test_ranks_with_dtensors_compare_once(ranks) -> None:
    ranks.run(check_compared_once, ranks=3)


# name -> (what replaces good operands, the error, what it says)
def _mistakes(mesh, group, whole):
    hidden, weight, bias, targets = whole

    def on(tensor, *placements):
        return distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)

    partial = DTensor.from_local(hidden.detach(), mesh, (Partial(),), run_check=False)
    count = on(torch.tensor(3.0, device=hidden.device), Replicate())
    v = len(weight)
    return {
        "hidden of features": (
            {"hidden": on(hidden, Shard(1))},
            ValueError,
            "hidden has the placements (Shard(dim=1),), expected Replicate or Shard of a dimension but the last, 1",
        ),
        "hidden unsummed": ({"hidden": partial}, ValueError, "hidden has the placements (Partial(sum),), expected"),
        "hidden of another width": (
            {"hidden": on(hidden[:, :7], Replicate())},
            ValueError,
            "weight must have the shape [V, 7] for hidden (20, 7)",
        ),
        "weight of columns": (
            {"weight": on(weight, Shard(1))},
            ValueError,
            "weight has the placements (Shard(dim=1),) on DeviceMesh(",
        ),
        "weight whole": (
            {"weight": on(weight, Replicate())},
            ValueError,
            "and Replicate on the others; of a whole weight pass weight.to_local()",
        ),
        "weight plain": (
            {"weight": weight.detach(), "bias": None},
            TypeError,
            "weight is a plain tensor, hidden a DTensor: expected weight as a DTensor with Shard(0)",
        ),
        "bias plain": ({"bias": bias.detach()}, TypeError, "bias is a plain tensor, weight a DTensor: expected a DT"),
        "bias whole": (
            {"bias": on(bias, Replicate())},
            ValueError,
            "bias has the placements (Replicate(),), expected those of weight, (Shard(dim=0),)",
        ),
        "targets of ranks": (
            {"targets": on(targets, Shard(0))},
            ValueError,
            "targets has the placements (Shard(dim=0),), expected (Replicate(),) on DeviceMesh(",
        ),
        "shard of another layout": (
            {"shard": VocabShard.padded(v, 64, group)},
            ValueError,
            "but weight's placements say VocabShard(start=",
        ),
        "shard of no group": ({"shard": VocabShard(0, v, v)}, ValueError, "but weight's placements say VocabShard("),
        "shard that is none": ({"shard": 3}, TypeError, "shard must be a VocabShard, got int"),
        "denominator": (
            {"denominator": count},
            TypeError,
            "denominator is a DTensor; pass denominator.full_tenso",
        ),
    }


def check_refused(group, device):
    inputs = make_inputs(20, 24, 301, device=device, bias=True)
    mesh = mesh_of(group, device)
    good = {
        "hidden": spread(inputs.hidden, mesh, Replicate()),
        "weight": spread(inputs.weight, mesh, Shard(0)),
        "bias": spread(inputs.bias, mesh, Shard(0)),
        "targets": inputs.targets,
    }
    mistakes = _mistakes(mesh, group, (inputs.hidden, inputs.weight, inputs.bias, inputs.targets))
    for name, (wrong, error, message) in mistakes.items():
        # on all ranks, and on one: the others must not wait for it
        for where in (None, 1):
            mine = where is None or dist.get_rank(group) == where
            arguments = {**good, **wrong} if mine else good
            with pytest.raises(error, match=re.escape(message)) as raised:
                linear_cross_entropy(**arguments)
            assert str(raised.value).startswith("rank 1 of the group") == (not mine), name
    # a shard that agrees is taken
    loss = linear_cross_entropy(**good, shard=VocabShard.chunked(301, group))
    assert_loss(loss.detach(), inputs)


def test_mistakes_are_told_on_every_rank(ranks) -> None:
    ranks.run(check_refused, ranks=3)


def check_refused_on_a_square(group, device):
    inputs = make_inputs(20, 24, 301, device=device)
    mesh = square_mesh(device)
    weight = spread(inputs.weight, mesh, Replicate(), Shard(0))
    hidden = spread(inputs.hidden, mesh, Replicate(), Replicate())
    with pytest.raises(ValueError, match=r"hidden is a DTensor on DeviceMesh\(.* expected one mesh"):
        linear_cross_entropy(spread(inputs.hidden, mesh["tp"], Replicate()), weight, inputs.targets)
    sharded_twice = spread(inputs.weight, mesh, Shard(0), Shard(0))
    with pytest.raises(ValueError, match="FSDP leaves a parameter sharded outside the forward"):
        linear_cross_entropy(hidden, sharded_twice, inputs.targets)
    with pytest.raises(ValueError, match=r"targets has the placements .* expected \(Shard\(dim=0\), Replicate\(\)\)"):
        linear_cross_entropy(
            spread(inputs.hidden, mesh, Shard(0), Replicate()),
            weight,
            spread(inputs.targets, mesh, Replicate(), Replicate()),
        )
    # its group is of no axis
    shard = VocabShard.even(301, group)
    rows = inputs.weight.detach()[shard.start : shard.stop]
    with pytest.raises(ValueError, match=r"shard is over the ranks \[0, 1, 2, 3\], hidden on DeviceMesh"):
        linear_cross_entropy(hidden, rows, inputs.targets, shard=shard)


def test_mistakes_on_a_mesh_of_two_axes(ranks) -> None:
    ranks.run(check_refused_on_a_square, ranks=4)


class Model(nn.Module):
    """ids [B, T] -> hidden states [B, T, D] -> the loss: of logits, until the head has one."""

    def __init__(self, bias: bool = True, vocab_size: int = 301) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab_size, 16, dtype=torch.float64)
        self.norm = nn.LayerNorm(16, dtype=torch.float64)
        self.up = nn.Linear(16, 24, dtype=torch.float64)
        self.down = nn.Linear(24, 16, dtype=torch.float64)
        self.lm_head = nn.Linear(16, vocab_size, bias=bias, dtype=torch.float64)

    def features(self, ids):
        x = self.embed(ids)
        return x + self.down(self.up(self.norm(x)).relu())

    def forward(self, ids, targets, reentrant=None, **options):
        hidden = self.features(ids)
        if not hasattr(self.lm_head, "loss"):
            return F.cross_entropy(self.lm_head(hidden).flatten(0, 1), targets.flatten())
        loss = functools.partial(self.lm_head.loss, **options)
        if reentrant is None:
            return loss(hidden, targets)
        return checkpoint(loss, hidden, targets, use_reentrant=reentrant)


def make_batch(size=4, vocab_size=301, length=9):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (size, length), generator=generator)
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORED
    return ids, targets


BODY = {"up": ColwiseParallel(), "down": RowwiseParallel()}
PLAN = {"embed": RowwiseParallel(input_layouts=Replicate()), **BODY}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    assert actual.shape == expected.shape
    error = (actual - expected).norm() / expected.norm()
    assert error <= FP64, f"{what}: off by {error:.1e}"


def assert_gradients_of(module: nn.Module, plain: nn.Module, shard: VocabShard | None = None) -> None:
    """Of all parameters; plain ones of head and embedding are the shard's rows."""
    expected = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        rows = slice(shard.start, shard.stop) if shard and len(parameter) == shard.rows else slice(None)
        assert_near(parameter.grad, expected[name].grad[rows], name)


def check_style(group, device, bias, vocab_size):
    plain = Model(bias, vocab_size)
    ids, targets = make_batch(vocab_size=vocab_size)
    model = parallelize_module(copy.deepcopy(plain), mesh_of(group, CPU), {**BODY, "lm_head": VocabParallelHead()})
    assert isinstance(model.lm_head, nn.Linear)
    for _, parameter in model.lm_head.named_parameters():
        assert_placed(parameter, Shard(0))
    expected, loss = plain(ids, targets), model(ids, targets)
    assert type(loss) is torch.Tensor
    assert_near(loss, expected)
    assert_same_bits(loss, group)
    expected.backward()
    loss.backward()
    assert_gradients_of(model, plain)
    assert_near(model(ids, targets, reduction="sum"), expected * (targets != IGNORED).sum())
    # logits as before, and the same gradients through them
    logits = model.lm_head(model.features(ids))
    assert type(logits + 0) is torch.Tensor
    assert_near(logits, plain.lm_head(plain.features(ids)))
    model.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    assert_gradients_of(model, plain)
    again = copy.deepcopy(model)
    assert_near(again(ids, targets), expected)
    assert again.lm_head.weight is not model.lm_head.weight


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("bias", "vocab_size"), [(True, 301), (False, 4)])
def test_head_in_a_plan(ranks, bias, vocab_size, size) -> None:
    ranks.run(check_style, bias, vocab_size, ranks=size)


def check_style_options(group, device):
    mesh, plain = mesh_of(group, CPU), Model()
    hidden = plain.features(make_batch()[0]).detach()

    def head(**options):
        return parallelize_module(copy.deepcopy(plain.lm_head), mesh, VocabParallelHead(**options))

    logits = head(output_layouts=Shard(-1), use_local_output=False)(hidden)
    assert_placed(logits, Shard(2))
    assert_near(logits, plain.lm_head(hidden))
    targets = make_batch()[1]
    whole, _ = reference.linear_log_probs(hidden, plain.lm_head.weight, targets, bias=plain.lm_head.bias)
    assert_near(head().log_probs(hidden, targets), whole)
    big = nn.Linear(8, 1 << 20, device="meta")
    assert parallelize_module(big, mesh, VocabParallelHead()).weight.to_local().is_meta
    assert "Replicate()" in repr(VocabParallelHead())
    with pytest.raises(TypeError, match=r"VocabParallelHead parallelizes an nn.Linear, got Embedding"):
        parallelize_module(copy.deepcopy(plain.embed), mesh, VocabParallelHead())
    columns = parallelize_module(copy.deepcopy(plain.lm_head), mesh, RowwiseParallel())
    with pytest.raises(ValueError, match=r"weight is a DTensor with the placements \(Shard\(dim=1\),\)"):
        parallelize_module(columns, mesh, VocabParallelHead())


def test_options_of_the_style(ranks) -> None:
    ranks.run(check_style_options, ranks=2)


def check_tied(group, device, again):
    plain = Model(bias=False)
    ids, targets = make_batch()
    model = copy.deepcopy(plain)
    plain.lm_head.weight = plain.embed.weight
    mesh = mesh_of(group, CPU)
    if again == "after":
        parallelize_module(model, mesh, {**PLAN, "lm_head": VocabParallelHead()})
        model.lm_head.weight = model.embed.weight
    else:
        parallelize_module(model, mesh, PLAN)
        model.lm_head.weight = model.embed.weight
        parallelize_module(model, mesh, {"lm_head": VocabParallelHead()})
        assert model.lm_head.weight is model.embed.weight
    expected, loss = plain(ids, targets), model(ids, targets)
    assert_near(loss, expected)
    expected.backward()
    loss.backward()
    assert_gradients_of(model, plain)


@pytest.mark.parametrize("again", ["after", "between"])
def test_tied_to_a_parallelized_embedding(ranks, again) -> None:
    ranks.run(check_tied, again, ranks=3)


class Collectives(TorchDispatchMode):
    """Records the collectives that gather and scatter whole tensors, as FSDP's do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("c10d::") and ("gather_" in name or "scatter_" in name) and name != "c10d::allgather_":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def check_fsdp(group, device, method, fields, unit):
    mesh, plain = square_mesh(CPU), Model()
    ids, targets = make_batch()
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {**PLAN, "lm_head": VocabParallelHead()})
    if unit == "head":
        fully_shard(model.lm_head, mesh=mesh["dp"], reshard_after_forward=False)
        register_fsdp_forward_method(model.lm_head, "loss")
    # the head is gathered alone, or with the rest
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    dp_rank = mesh.get_local_rank("dp")
    mine = slice(2 * dp_rank, 2 * dp_rank + 2)
    plain(ids, targets).backward()
    count = int((targets != IGNORED).sum())
    for _ in range(2):
        model.zero_grad()
        with Collectives() as collectives, forced_plan(**fields):
            # FSDP takes the mean over its ranks
            loss = model(ids[mine], targets[mine], denominator=count / 2, method=method)
            loss.backward()
        units = 2 if unit == "head" else 1
        assert len(collectives.names) == 2 * units, collectives.names
        assert sum("scatter" in name for name in collectives.names) == units, collectives.names
        assert_gradients_of(model, plain)


@pytest.mark.parametrize(
    ("method", "fields", "unit"),
    [
        ("recompute", {"panel": 64, "wide": 0, "rows": 8}, "head"),
        ("cached", {"kept": 0, "panel": 64, "wide": 0}, "model"),
        ("fused", {"chunk": 4}, "head"),
        ("fused", {"chunk": 4}, "model"),
    ],
)
def test_fsdp_gathers_and_scatters_the_head_once(ranks, method, fields, unit) -> None:
    ranks.run(check_fsdp, method, fields, unit, ranks=4)


def check_mixed_precision(group, device):
    """fp32 parameters that FSDP gathers in 16 bits; the same tokens on all ranks, whose mean is then exact."""
    mesh = square_mesh(device)
    inputs = make_inputs(45, 24, 301, torch.bfloat16, device=device, ignored=0.2)
    head = nn.Linear(24, 301, bias=False, device=device)
    with torch.no_grad():
        head.weight.copy_(inputs.weight)
    parallelize_module(head, mesh["tp"], VocabParallelHead())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(head, mesh=mesh["dp"], mp_policy=policy)
    register_fsdp_forward_method(head, "loss")
    hidden = inputs.hidden.detach().requires_grad_()
    loss = head.loss(hidden, inputs.targets)
    assert_loss(loss.detach(), inputs)
    loss.backward()
    d_weight = head.weight.grad.full_tensor()
    assert d_weight.dtype == torch.float32
    assert_gradients([hidden.grad, d_weight.bfloat16(), None], inputs)


def test_fsdp_with_mixed_precision(ranks) -> None:
    ranks.run(check_mixed_precision, ranks=4)


def check_outside_forward(group, device):
    mesh = square_mesh(CPU)
    head = parallelize_module(Model().lm_head, mesh["tp"], VocabParallelHead())
    fully_shard(head, mesh=mesh["dp"])
    hidden, targets = torch.zeros(4, 16, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"register_fsdp_forward_method"):
        head.loss(hidden, targets)
    register_fsdp_forward_method(head, "loss")
    assert head.loss(hidden, targets).isfinite()


def test_the_loss_outside_of_a_forward_says_what_to_do(ranks) -> None:
    ranks.run(check_outside_forward, ranks=4)


def check_data_parallel_alone(group, device):
    """Outside its forward a parameter of FSDP looks like a vocabulary spread over the data-parallel ranks."""
    head = nn.Linear(16, 301, dtype=torch.float64)
    fully_shard(head, mesh=mesh_of(group, CPU))
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    hidden = torch.randn(20, 16, dtype=torch.float64, generator=generator)
    targets = torch.randint(301, (20,), generator=generator)
    with pytest.raises(ValueError, match="a checksum of targets must be the same on every rank of the group"):
        linear_cross_entropy(hidden, head.weight, targets, bias=head.bias)


def test_ranks_with_other_tokens_are_told_apart(ranks) -> None:
    ranks.run(check_data_parallel_alone, ranks=3)


def spread_over(plain: Model, group: dist.ProcessGroup) -> Model:
    """Plain parameters: a body that all ranks hold, a head and embedding of which each holds rows."""
    model = copy.deepcopy(plain)
    model.lm_head = VocabParallelLMHead.from_linear(plain.lm_head, group)
    model.embed = VocabParallelEmbedding.from_embedding(plain.embed, group)
    return model


def check_ddp(group, device):
    mesh, plain = square_mesh(CPU), Model()
    ids, targets = make_batch(8)
    plain(ids, targets).backward()
    model = spread_over(plain, mesh.get_group("tp"))
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    first = 4 * mesh.get_local_rank("dp")
    count = int((targets != IGNORED).sum())
    for _ in range(2):
        model.zero_grad()
        # DDP takes the mean over its ranks
        with wrapped.no_sync():
            wrapped(ids[first : first + 1], targets[first : first + 1], denominator=count / 2).backward()
        rest = slice(first + 1, first + 4)
        wrapped(ids[rest], targets[rest], denominator=count / 2).backward()
        assert_gradients_of(model, plain, model.lm_head.shard)


def test_ddp_and_accumulated_gradients(ranks) -> None:
    ranks.run(check_ddp, ranks=4)


def check_a_rank_without_a_token(group, device, wrapper, method, fields):
    """It takes part in every collective, and each gradient is there once, however many pieces made it."""
    mesh, plain = square_mesh(CPU), Model()
    ids, targets = make_batch(8)
    targets[4:] = IGNORED
    plain(ids, targets).backward()
    if wrapper == "DDP":
        model = spread_over(plain, mesh.get_group("tp"))
        wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    else:
        wrapped = model = parallelize_module(
            copy.deepcopy(plain), mesh["tp"], {**PLAN, "lm_head": VocabParallelHead()}
        )
        fully_shard(model, mesh=mesh["dp"])
    made = []
    for parameter in (model.lm_head.weight, model.lm_head.bias):
        parameter.register_post_accumulate_grad_hook(lambda parameter: made.append(len(made)))
    mine = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)
    count = int((targets != IGNORED).sum())
    with forced_plan(**fields):
        # both take the mean over their ranks
        loss = wrapped(ids[mine], targets[mine], denominator=count / 2, method=method)
        loss.backward()
    assert (loss == 0) == (mesh.get_local_rank("dp") == 1)
    assert len(made) == 2, "a gradient was made more than once, or not at all"
    assert_gradients_of(model, plain, model.lm_head.shard if wrapper == "DDP" else None)


@pytest.mark.parametrize(
    ("wrapper", "method", "fields"),
    [
        ("DDP", "recompute", {"panel": 64, "wide": 0, "rows": 8}),
        ("DDP", "cached", {"kept": 64, "panel": 64, "wide": 0, "rows": 8}),
        ("DDP", "fused", {"chunk": 4}),
        ("FSDP", "fused", {"chunk": 4}),
    ],
)
def test_a_data_parallel_rank_without_a_token(ranks, wrapper, method, fields) -> None:
    ranks.run(check_a_rank_without_a_token, wrapper, method, fields, ranks=4)


def check_auxiliary_loss(group, device, kind):
    """A loss of its own kind beside ours, in one backward: torch's cross_entropy, of plain logits and of DTensors."""
    mesh, plain = mesh_of(group, CPU), Model()
    torch.manual_seed(2)
    router = nn.Linear(16, 5, dtype=torch.float64)
    ids, targets = make_batch()
    choices = ids.flatten() % 5

    def auxiliary(router, hidden):
        logits = router(hidden).flatten(0, 1)
        if kind != "dtensor" or router is plain_router:
            return F.cross_entropy(logits, choices)
        logits = DTensor.from_local(logits, mesh, (Replicate(),), run_check=False)
        return F.cross_entropy(logits, spread(choices, mesh, Replicate())).to_local()

    plain_router = copy.deepcopy(router)
    hidden = plain.features(ids)
    expected = F.cross_entropy(plain.lm_head(hidden).flatten(0, 1), targets.flatten())
    expected = expected + 0.5 * auxiliary(plain_router, hidden)
    expected.backward()
    if kind == "plain":
        model = spread_over(plain, group)
    else:
        model = parallelize_module(copy.deepcopy(plain), mesh, {**PLAN, "lm_head": VocabParallelHead()})
    hidden = model.features(ids)
    loss = model.lm_head.loss(hidden, targets) + 0.5 * auxiliary(router, hidden)
    assert_near(loss, expected)
    loss.backward()
    assert_gradients_of(model, plain, model.lm_head.shard if kind == "plain" else None)
    assert_gradients_of(router, plain_router)


@pytest.mark.parametrize("kind", ["plain", "dtensor"])
def test_an_auxiliary_loss_beside_it(ranks, kind) -> None:
    ranks.run(check_auxiliary_loss, kind, ranks=2)


def check_fsdp_accumulates(group, device):
    mesh, plain = square_mesh(CPU), Model()
    ids, targets = make_batch(8)
    plain(ids, targets).backward()
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {**PLAN, "lm_head": VocabParallelHead()})
    # gathered anew for backward
    fully_shard(model.lm_head, mesh=mesh["dp"], reshard_after_forward=True)
    register_fsdp_forward_method(model.lm_head, "loss")
    fully_shard(model, mesh=mesh["dp"])
    first = 4 * mesh.get_local_rank("dp")
    count = int((targets != IGNORED).sum())
    # with one reduction, of the last
    model.set_requires_gradient_sync(False)
    model(ids[first : first + 1], targets[first : first + 1], denominator=count / 2).backward()
    model.set_requires_gradient_sync(True)
    rest = slice(first + 1, first + 4)
    model(ids[rest], targets[rest], denominator=count / 2).backward()
    assert_gradients_of(model, plain)


def test_fsdp_accumulates_gradients(ranks) -> None:
    ranks.run(check_fsdp_accumulates, ranks=4)


def check_checkpointing(group, device, kind, reentrant, method):
    plain = Model()
    ids, targets = make_batch()
    expected = plain(ids, targets)
    expected.backward()
    if kind == "plain":
        model = spread_over(plain, group)
    else:
        plan = {**PLAN, "lm_head": VocabParallelHead()}
        model = parallelize_module(copy.deepcopy(plain), mesh_of(group, CPU), plan)
    loss = model(ids, targets, reentrant=reentrant, method=method)
    assert_near(loss, expected)
    loss.backward()
    assert_gradients_of(model, plain, model.lm_head.shard if kind == "plain" else None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["plain", "dtensor"])
def test_activation_checkpointing_around_the_loss(ranks, kind, reentrant, method) -> None:
    ranks.run(check_checkpointing, kind, reentrant, method, ranks=2)


def unleafed(leaf: DTensor) -> DTensor:
    """As a model's hidden states are. Of a leaf with uneven slices torch 2.11 accumulates the gradient with another
    placement."""
    hidden = leaf.clone()
    hidden.retain_grad()
    return hidden


def check_sequence(group, device, shape, dim, dtype, options, method=None):
    """Each rank holds a slice of the hidden states' sequence and gets that slice's gradient."""
    inputs = make_inputs(shape[0] * shape[1], 24, 301, dtype, device=device, bias=True, ignored=0.2)
    mesh = mesh_of(group, device)
    whole = inputs.hidden if dim is None else inputs.hidden.view(*shape, 24)
    hidden = unleafed(spread(whole, mesh, Shard(dim or 0)))
    targets = inputs.targets.view(whole.shape[:-1])
    weight, bias = spread(inputs.weight, mesh, Shard(0)), spread(inputs.bias, mesh, Shard(0))
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, method=method, **options)
    assert type(loss) is torch.Tensor
    assert loss.shape == (targets.shape if options.get("reduction") == "none" else ())
    assert_loss(loss.detach().flatten() if loss.dim() else loss.detach(), inputs, **options)
    assert_same_bits(loss, group)
    upstream = make_upstream(loss)
    loss.backward(upstream)
    assert_placed(hidden.grad, *hidden.placements)
    assert hidden.grad.to_local().shape == hidden.to_local().shape
    assert_placed(weight.grad, Shard(0))
    d_hidden = hidden.grad.full_tensor().flatten(0, -2)
    gradients = [d_hidden, weight.grad.full_tensor(), bias.grad.full_tensor()]
    assert_gradients(gradients, inputs, None if upstream is None else upstream.flatten(), **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
# 9 over 4 ranks: 3, 3, 3 and none. without a dimension the tokens are flat
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_slices_of_the_sequence(ranks, dim, size) -> None:
    ranks.run(check_sequence, (5, 9), dim, torch.float32, {}, ranks=size)


@pytest.mark.parametrize(
    ("reduction", "method"), [("none", None), ("sum", "recompute"), ("sum", "cached"), ("mean", "fused")]
)
def test_methods_with_slices_of_the_sequence(ranks, reduction, method) -> None:
    ranks.run(check_sequence, (5, 7), 1, torch.bfloat16, {"reduction": reduction}, method, ranks=3)


def check_other_dimensions_of_the_sequence(group, device):
    # as on a GPU, where a group remembers what its ranks have told each other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_comparing_waits", lambda device: True)
        for dim in (0, 1, 0):
            check_sequence(group, device, (5, 9), dim, torch.float32, {})


def test_slices_along_other_dimensions_are_other_calls(ranks) -> None:
    ranks.run(check_other_dimensions_of_the_sequence, ranks=2)


def check_options_on_a_mesh(group, device):
    """Weights of tokens are placed as the targets are; the other options are plain."""
    inputs = make_inputs(24, 24, 301, device=device, ignored=0.2)
    mesh = mesh_of(group, device)
    weight, hidden = spread(inputs.weight, mesh, Shard(0)), unleafed(spread(inputs.hidden, mesh, Shard(0)))
    plain = torch.linspace(0.5, 2, 24, device=device)
    options = {"token_weight": plain, "softcap": 5.0, "z_loss": 0.1}
    targets, of_tokens = (spread(x, mesh, Replicate()) for x in (inputs.targets, plain))
    loss, stats = linear_cross_entropy(
        hidden, weight, targets, return_stats=True, **{**options, "token_weight": of_tokens}
    )
    assert_loss(loss.detach(), inputs, **options)
    assert type(stats.argmax) is torch.Tensor
    loss.backward()
    gradients = [hidden.grad.full_tensor(), weight.grad.full_tensor(), None]
    assert_gradients(gradients, inputs, **options)
    # beside plain targets a DTensor of weights would say nothing of whose tokens they are
    with pytest.raises(
        TypeError, match=r"token_weight is a DTensor with the placements .* expected those of targets"
    ):
        linear_cross_entropy(hidden, weight, inputs.targets, token_weight=of_tokens)
    for name in ("logit_scale", "class_weight"):
        with pytest.raises(TypeError, match=f"{name} is a DTensor; pass {name}.full_tensor()"):
            linear_cross_entropy(hidden, weight, targets, **{name: of_tokens})


def test_options_on_a_mesh(ranks) -> None:
    ranks.run(check_options_on_a_mesh, ranks=2)


def check_sequence_on_a_square(group, device):
    inputs = make_inputs(4 * 7, 24, 301, device=device, ignored=0.2)
    mesh = square_mesh(device)
    weight = spread(inputs.weight, mesh, Replicate(), Shard(0))
    hidden = unleafed(spread(inputs.hidden.view(4, 7, 24), mesh, Shard(0), Shard(1)))
    targets = spread(inputs.targets.view(4, 7), mesh, Shard(0), Replicate())
    count = int((inputs.targets != IGNORED).sum())
    loss = linear_cross_entropy(hidden, weight, targets, denominator=count)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    assert_loss(total, inputs, denominator=count)
    assert_placed(hidden.grad, Shard(0), Shard(1))
    assert_placed(weight.grad, Partial(), Shard(0))
    gradients = [hidden.grad.full_tensor().flatten(0, 1), weight.grad.full_tensor(), None]
    assert_gradients(gradients, inputs, denominator=count)


def test_batch_and_sequence_on_two_axes(ranks) -> None:
    ranks.run(check_sequence_on_a_square, ranks=4)


def check_sequence_shards(group, device):
    inputs = make_inputs(20, 24, 301, device=device)
    mesh = mesh_of(group, device)
    weight = spread(inputs.weight, mesh, Shard(0))
    sliced, whole = spread(inputs.hidden, mesh, Shard(0)), spread(inputs.hidden, mesh, Replicate())
    shard = VocabShard.chunked(301, group)
    sequence = dataclasses.replace(shard, sequence_parallel=True)
    # a DTensor says whether it is a slice; a plain tensor does not
    for hidden, given in ((sliced, None), (sliced, sequence), (whole, shard), (sliced.to_local(), sequence)):
        loss = linear_cross_entropy(hidden, weight, inputs.targets, shard=given)
        assert_loss(loss.detach(), inputs)
    for hidden, given in ((sliced, shard), (whole, sequence)):
        with pytest.raises(ValueError, match=r"shard is VocabShard\(.* but weight's placements say VocabShard\("):
            linear_cross_entropy(hidden, weight, inputs.targets, shard=given)
    rows = inputs.weight.detach()[shard.start : shard.stop]
    loss = linear_cross_entropy(sliced, rows, inputs.targets, shard=sequence)
    assert_loss(loss.detach(), inputs)
    with pytest.raises(ValueError, match="shard has sequence_parallel=False, expected True for hidden"):
        linear_cross_entropy(sliced, rows, inputs.targets, shard=shard)


def test_slices_and_shards_agree(ranks) -> None:
    ranks.run(check_sequence_shards, ranks=3)


SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "lm_head": VocabParallelHead(input_layouts=Shard(1)),
}


def check_sequence_parallel_body(group, device):
    plain = Model()
    ids, targets = make_batch(length=4 * group.size())
    model = parallelize_module(copy.deepcopy(plain), mesh_of(group, CPU), SEQUENCE)
    expected, loss = plain(ids, targets), model(ids, targets)
    assert_near(loss, expected)
    assert_same_bits(loss, group)
    expected.backward()
    loss.backward()
    assert_gradients_of(model, plain)
    assert_near(model.lm_head(model.features(ids)), plain.lm_head(plain.features(ids)))
    # plain slices may be uneven
    rank, size = dist.get_rank(group), group.size()
    cuts = [0, *range(1, size), ids.shape[1]]
    whole = plain.features(ids).detach()
    mine = whole[:, cuts[rank] : cuts[rank + 1]].clone().requires_grad_()
    model.lm_head.loss(mine, targets).backward()
    whole.requires_grad_()
    F.cross_entropy(plain.lm_head(whole).flatten(0, 1), targets.flatten()).backward()
    assert_near(mine.grad, whole.grad[:, cuts[rank] : cuts[rank + 1]])


@pytest.mark.parametrize("size", [2, 3])
def test_head_after_a_sequence_parallel_body(ranks, size) -> None:
    ranks.run(check_sequence_parallel_body, ranks=size)


def check_fsdp_with_sequence_parallel(group, device):
    mesh, plain = square_mesh(CPU), Model()
    ids, targets = make_batch(length=8)
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], SEQUENCE)
    fully_shard(model, mesh=mesh["dp"])
    first = 2 * mesh.get_local_rank("dp")
    mine = slice(first, first + 2)
    model(ids[mine], targets[mine], denominator=int((targets != IGNORED).sum()) / 2).backward()
    plain(ids, targets).backward()
    assert_gradients_of(model, plain)


def test_fsdp_with_a_sequence_parallel_body(ranks) -> None:
    ranks.run(check_fsdp_with_sequence_parallel, ranks=4)
