"""Every option, the statistics and the log-probabilities over groups of ranks. The checks run on spawned ranks, or on
those of a torchrun job: ``torchrun --nproc-per-node 2 -m pytest tests/test_options_sharded.py``."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from inputs import IGNORED, OPTIONS, Inputs, gradients_of, make_inputs, make_options, make_trained_inputs
from plans import SEAMS, forced_plan
from shards import assert_same_bits, gathered, shard_of, whole_of
from tolerance import assert_gradients, assert_log_probs, assert_loss

from cce_dist import VocabParallelLMHead, VocabShard, linear_cross_entropy, linear_log_probs, reference

METHODS = ["recompute", "cached", "fused"]
MANY = [tuple(x for x in OPTIONS if x != without) for without in ("softcap", "label_smoothing")]
PAIRS = [*combinations(OPTIONS, 2)]
# a vocabulary of 2 leaves ranks of three without a row, by either layout
V = 701


def taken(method: str, names) -> bool:
    return method == "recompute" or not {"softcap", "label_smoothing"} <= set(names)


def rows_of(whole: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """This rank's, a new leaf; NaN in the rows of padding."""
    part = whole.new_full((shard.rows, *whole.shape[1:]), math.nan)
    part[: shard.classes] = whole.detach()[shard.start : shard.start + shard.classes]
    return part.requires_grad_()


def local(inputs: Inputs, shard: VocabShard) -> Inputs:
    hidden = inputs.hidden.detach().clone().requires_grad_()
    return Inputs(hidden, rows_of(inputs.weight, shard), inputs.targets, rows_of(inputs.bias, shard))


def spoil_ignored(inputs: Inputs) -> Inputs:
    with torch.no_grad():
        inputs.hidden[inputs.targets == IGNORED] = math.nan
    return inputs


def upstream_for(shape, device, seed=1) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 3 - 1).to(device)


def assert_whole_gradients(gradients, shard, inputs, upstream, **options) -> None:
    """``gradients`` of a rank: of hidden states and options the same on all, of weight and bias its rows'."""
    hidden, weight, bias, *rest = gradients
    for gradient in (hidden, *rest):
        if gradient is not None:
            assert_same_bits(gradient, shard.group)
    for rows in (weight, bias):
        assert (rows[shard.classes :] == 0).all(), "padding has a gradient"
    assert_gradients([hidden, whole_of(weight, shard), whole_of(bias, shard), *rest], inputs, upstream, **options)


def check_options(group, device, layout, dtype, v, method, names, n=35):
    if dtype == torch.bfloat16:
        inputs = make_trained_inputs(300, 64, v, dtype, device=device, bias=True, ignored=0.2)
    else:
        inputs = make_inputs(n, 24, v, dtype, device=device, bias=True, ignored=0.2)
    spoil_ignored(inputs)
    shard = shard_of(layout, v, group)
    ours = local(inputs, shard)
    options = make_options(names, inputs, frozen=("token_weight",) if method == "fused" else ())
    options["reduction"] = "mean" if method == "fused" else "none"
    yardstick = "output" if dtype == torch.bfloat16 else "operands"

    def call(method):
        return linear_cross_entropy(*ours[:3], bias=ours.bias, shard=shard, method=method, **options)

    base = call("recompute")
    upstream = upstream_for(base.shape, device)
    # sums of fp16 do not wait for blocks of tokens
    with forced_plan(**{name: x for name, x in SEAMS[method].items() if name != "rows" or dtype != torch.float16}):
        loss = call(method)
        assert torch.equal(loss, base), "the loss depends on the method"
        assert_same_bits(loss, group)
        gradients = gradients_of(loss, ours, options, upstream)
    assert_loss(loss.detach(), inputs, **options)
    assert_whole_gradients(gradients, shard, inputs, upstream, yardstick=yardstick, **options)


def check_many(group, device, layout, v, method, sets):
    """A spawned check costs more to start than to run."""
    for names in sets:
        if taken(method, names):
            try:
                check_options(group, device, layout, torch.float32, v, method, names)
            except AssertionError as error:
                raise AssertionError(f"{'-'.join(names)}: {error}") from error


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", ["even", "chunked", "padded"])
@pytest.mark.parametrize("method", METHODS)
def test_every_option(ranks, method, layout, size) -> None:
    ranks.run(check_many, layout, V, method, [(name,) for name in OPTIONS] + MANY, ranks=size)


@pytest.mark.parametrize(("layout", "method"), [("even", "recompute"), ("padded", "cached"), ("chunked", "fused")])
def test_pairs(ranks, layout, method) -> None:
    ranks.run(check_many, layout, V, method, [*PAIRS, OPTIONS], ranks=2)


@pytest.mark.parametrize("v", [2, 3, 17, 257])
@pytest.mark.parametrize("layout", ["chunked", "padded"])
def test_small_vocabularies_and_empty_shards(ranks, layout, v) -> None:
    for method in METHODS:
        ranks.run(check_many, layout, v, method, [("label_smoothing",), ("class_weight", "z_loss"), MANY[1]], ranks=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(ranks, dtype) -> None:
    for names in MANY:
        ranks.run(check_options, "padded", dtype, V, "recompute", names, ranks=2)
        if dtype != torch.float16:
            ranks.run(check_options, "even", dtype, V, "fused", names, ranks=2)


@pytest.mark.parametrize(
    ("method", "names"), [("recompute", MANY[1]), ("fused", MANY[0])], ids=["recompute", "fused"]
)
def test_interpreted_kernels(ranks, method, names) -> None:
    ranks.run(check_options, "padded", torch.float32, 201, method, names, 18, ranks=2, interpret=True)


def check_slices(group, device, method, names, lengths):
    n, v = sum(lengths), V
    inputs = spoil_ignored(make_inputs(n, 24, v, device=device, bias=True, ignored=0.2))
    shard = VocabShard.even(v, group, sequence_parallel=True)
    whole = local(inputs, shard)
    hidden = inputs.hidden.detach().split(lengths)[dist.get_rank(group)].clone().requires_grad_()
    ours = whole._replace(hidden=hidden)
    options = make_options(names, inputs, frozen=("token_weight",) if method == "fused" else ())
    options["reduction"] = "mean" if method == "fused" else "none"
    plain = VocabShard.even(v, group)
    expected = linear_cross_entropy(*whole[:3], bias=whole.bias, shard=plain, return_stats=True, **options)
    upstream = upstream_for(expected[0].shape, device)
    with forced_plan(**SEAMS[method]):
        loss, stats = linear_cross_entropy(
            *ours[:3], bias=ours.bias, shard=shard, method=method, return_stats=True, **options
        )
        assert torch.equal(loss, expected[0]), "the loss depends on who holds the hidden states"
        for one, other in zip(stats, expected[1], strict=True):
            assert torch.equal(one, other)
        d_hidden, *rest = gradients_of(loss, ours, options, upstream)
    assert d_hidden.shape == hidden.shape
    assert_loss(loss.detach(), inputs, **options)
    # whole on every rank
    gradients = [gathered(d_hidden, 0, group), *rest]
    assert_whole_gradients(gradients, plain, inputs, upstream, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [[14, 9, 12], [0, 3, 20]], ids=str)
def test_slices(ranks, lengths, method) -> None:
    for names in MANY:
        ranks.run(check_slices, method, names, lengths, ranks=3)


def check_bits(group, device, layout, method):
    """Of losses, statistics, log-probabilities and entropies, against one rank's."""
    v = 1030
    inputs = make_inputs(37, 24, v, device=device, bias=True, ignored=0.2)
    shard = VocabShard.even(v, group, multiple_of=256) if layout == "blocks" else VocabShard.padded(v, 256, group)
    ours = local(inputs, shard)
    with torch.no_grad():
        for names in ((), *((name,) for name in OPTIONS), *MANY):
            options = make_options(names, inputs, frozen=("token_weight",))
            one, stats = linear_cross_entropy(*inputs[:3], bias=inputs.bias, return_stats=True, **options)
            many, merged = linear_cross_entropy(
                *ours[:3], bias=ours.bias, shard=shard, method=method, return_stats=True, **options
            )
            assert torch.equal(one, many), f"{names}: the loss depends on the group's size"
            for name, ones, others in zip(stats._fields, stats, merged, strict=True):
                assert torch.equal(ones, others), f"{names}: {name} depends on the group's size"
        for names in ((), ("logit_scale",), ("softcap", "logit_scale")):
            options = make_options(names, inputs)
            one = linear_log_probs(*inputs[:3], bias=inputs.bias, return_entropy=True, **options)
            many = linear_log_probs(*ours[:3], bias=ours.bias, shard=shard, return_entropy=True, **options)
            for name, ones, others in zip(("log_probs", "entropy"), one, many, strict=True):
                assert torch.equal(ones, others), f"{names}: {name} depends on the group's size"
            # and on the tokens beside
            part = slice(5, 23)
            few = linear_log_probs(
                ours.hidden[part], ours.weight, ours.targets[part], bias=ours.bias, shard=shard, return_entropy=True,
                **options,
            )  # fmt: skip
            for ones, others in zip(few, one, strict=True):
                assert torch.equal(ones, others[part])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", ["blocks", "padded"])
def test_the_same_bits_for_every_group_size(ranks, layout, size) -> None:
    ranks.run(check_bits, layout, "recompute", ranks=size)


def check_log_probs(group, device, layout, dtype, v, names, lengths=None):
    inputs = spoil_ignored(make_inputs(35, 24, v, dtype, device=device, bias=True, ignored=0.2))
    shard = plain = shard_of(layout, v, group)
    ours, options = local(inputs, shard), make_options(names, inputs)
    if lengths is not None:
        shard = VocabShard(plain.start, plain.stop, v, group, sequence_parallel=True)
        hidden = inputs.hidden.detach().split(lengths)[dist.get_rank(group)].clone().requires_grad_()
        ours = ours._replace(hidden=hidden)
    results = linear_log_probs(*ours[:3], bias=ours.bias, shard=shard, return_entropy=True, **options)
    for result in results:
        assert_same_bits(result, group)
    assert_log_probs(*(x.detach() for x in results), inputs, **options)
    upstream = [upstream_for(35, device, seed) for seed in (1, 2)]
    gradients = gradients_of(results, ours, options, upstream)
    if lengths is not None:
        gradients[0] = gathered(gradients[0], 0, group)
    assert_whole_gradients(gradients, plain, inputs, upstream, function=reference.log_probs, **options)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", ["even", "chunked", "padded"])
def test_log_probs(ranks, layout, size) -> None:
    ranks.run(check_log_probs, layout, torch.float32, V, ("softcap", "logit_scale"), ranks=size)
    ranks.run(check_log_probs, layout, torch.float32, 2, (), ranks=size)


def test_log_probs_of_slices(ranks) -> None:
    ranks.run(check_log_probs, "even", torch.float32, V, ("softcap", "logit_scale"), [14, 9, 12], ranks=3)
    ranks.run(check_log_probs, "even", torch.float32, V, (), [0, 35], ranks=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_log_probs_in_other_dtypes(ranks, dtype) -> None:
    ranks.run(check_log_probs, "padded", dtype, V, ("softcap", "logit_scale"), ranks=2)


def test_interpreted_log_probs(ranks) -> None:
    ranks.run(check_log_probs, "padded", torch.float32, 133, ("softcap", "logit_scale"), ranks=2, interpret=True)


def check_statistics(group, device, layout):
    inputs = make_inputs(40, 24, 600, device=device, bias=True)
    with torch.no_grad():
        # every class is there twice, on two ranks where there are any
        for x in (inputs.weight, inputs.bias):
            x[300:] = x[:300]
        inputs.targets[::5] = IGNORED
    spoil_ignored(inputs)
    shard = shard_of(layout, 600, group)
    ours = local(inputs, shard)
    _, stats = linear_cross_entropy(*ours[:3], bias=ours.bias, shard=shard, softcap=5.0, return_stats=True)
    valid = inputs.targets != IGNORED
    x = reference._product(inputs.hidden[valid], inputs.weight, inputs.bias, torch.float64)
    x = 5 * torch.tanh(x / 5)
    for each in stats:
        assert_same_bits(each, group)
        assert not each.requires_grad
    assert torch.equal(stats.argmax[valid], x[:, :300].argmax(-1)), "not the lowest of equal classes"
    log_prob, entropy = reference.log_probs(x, inputs.targets[valid])
    for ours, truth in zip(stats[:3], (x.logsumexp(-1), log_prob, entropy), strict=True):
        torch.testing.assert_close(ours[valid].double(), truth, rtol=1e-5, atol=1e-5)
    assert (stats.argmax[~valid] == -1).all()
    # all equal: the first, on the first rank
    with torch.no_grad():
        local_weight, local_bias = torch.zeros_like(rows_of(inputs.weight, shard)), None
        hidden = torch.ones_like(inputs.hidden)
        _, stats = linear_cross_entropy(
            hidden, local_weight, inputs.targets, bias=local_bias, shard=shard, return_stats=True
        )
    assert torch.equal(stats.argmax, torch.where(valid, 0, -1))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", ["even", "chunked", "padded"])
def test_statistics(ranks, layout, size) -> None:
    ranks.run(check_statistics, layout, ranks=size)


def check_nothing_weighs(group, device):
    inputs = make_inputs(9, 24, 300, device=device, bias=True)
    shard = VocabShard.chunked(300, group)
    for method in METHODS:
        for what in ("tokens", "classes", "no token"):
            ours = local(inputs, shard)
            options = make_options(MANY[1], inputs, frozen=("token_weight",))
            if what == "tokens":
                options["token_weight"].zero_()
            elif what == "classes":
                options["class_weight"].zero_()
            else:
                ours = ours._replace(targets=torch.full_like(inputs.targets, IGNORED))
                with torch.no_grad():
                    ours.hidden.fill_(math.nan)
            loss = linear_cross_entropy(*ours[:3], bias=ours.bias, shard=shard, method=method, **options)
            assert loss == 0
            assert all((x == 0).all() for x in gradients_of(loss, ours, options) if x is not None)


def test_nothing_weighs_anything(ranks) -> None:
    ranks.run(check_nothing_weighs, ranks=2)


def check_head(group, device):
    inputs = make_inputs(12, 24, 101, device=device, bias=True, ignored=0.2)
    linear = torch.nn.Linear(24, 101, device=device)
    with torch.no_grad():
        linear.weight.copy_(inputs.weight)
        linear.bias.copy_(inputs.bias)
    head = VocabParallelLMHead.from_linear(linear, group)
    log_probs, entropy = head.log_probs(inputs.hidden, inputs.targets, softcap=2.5, return_entropy=True)
    assert_log_probs(log_probs.detach(), entropy.detach(), inputs, softcap=2.5)
    options = make_options(MANY[0], inputs)
    loss = head.loss(inputs.hidden, inputs.targets, **options)
    assert_loss(loss.detach(), inputs, **options)


def test_the_head_passes_options_on(ranks) -> None:
    ranks.run(check_head, ranks=3)


def check_disagreement(group, device):
    odd, rows = dist.get_rank(group) == group.size() - 1, VocabShard.even(20, group).rows
    hidden, weight = torch.zeros(4, 8, device=device), torch.zeros(rows, 8, device=device)
    targets = torch.zeros(4, dtype=torch.int64, device=device)
    tensors = {"token_weight": torch.ones(4, device=device), "class_weight": torch.ones(20, device=device)}

    def expect(name, message=None, function=linear_cross_entropy, **options):
        # compared anew: on GPUs a shard remembers
        with pytest.raises(ValueError, match=f"{message or name} must be the same on every rank"):
            function(hidden, weight, targets, shard=VocabShard.even(20, group), **options)
        # nothing is left behind
        function(hidden, weight, targets, shard=VocabShard.even(20, group))

    for name, values in {
        "label_smoothing": (0.1, 0.2), "z_loss": (0.0, 1e-4), "softcap": (None, 30.0), "logit_scale": (1.0, 0.5),
    }.items():  # fmt: skip
        expect(name, **{name: values[odd]})
    for name, tensor in tensors.items():
        expect(name, f"[a-z ]*{name}", **{name: tensor if odd else None})
    expect("return_stats", "[a-z ]*return_stats", return_stats=odd)
    for name, values in {"softcap": (None, 30.0), "logit_scale": (1.0, 0.5)}.items():
        expect(name, function=linear_log_probs, **{name: values[odd]})
    expect("return_entropy", "[a-z ]*return_entropy", function=linear_log_probs, return_entropy=odd)
    # one rank's mistake is everybody's
    wrong = {"label_smoothing": 2.0} if odd else {}
    with pytest.raises(ValueError, match=r"label_smoothing .*2\.0"):
        linear_cross_entropy(hidden, weight, targets, shard=VocabShard.even(20, group), **wrong)
    # of the whole vocabulary, on every rank
    if group.size() > 1:
        with pytest.raises(ValueError, match=r"class_weight .*20"):
            linear_cross_entropy(
                hidden,
                weight,
                targets,
                shard=VocabShard.even(20, group),
                class_weight=torch.ones(rows, device=device),
            )


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree(ranks, size) -> None:
    ranks.run(check_disagreement, ranks=size)


def check_dtensor_options(group, device):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = DeviceMesh.from_group(group, device.type)
    inputs = make_inputs(4, 8, 20, device=device)
    for name, value in {"logit_scale": torch.ones(()), "class_weight": torch.ones(20)}.items():
        value = distribute_tensor(value.to(device), mesh, [Replicate()])
        with pytest.raises(TypeError, match=f"{name} is a DTensor"):
            linear_cross_entropy(*inputs[:3], **{name: value})


def test_dtensors_are_no_options(ranks) -> None:
    ranks.run(check_dtensor_options, ranks=2)
