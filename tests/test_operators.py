"""Inside of torch.compile, and captured in a CUDA graph: the same bits as without, in one graph."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch._functorch.config
from inputs import IGNORED, OPTIONS, make_inputs, make_options
from plans import SEAMS, forced_plan
from pool import JobRanks
from torch._dynamo.testing import CompileCounterWithBackend

from cce_dist import (
    LinearCrossEntropyLoss,
    VocabParallelLMHead,
    VocabShard,
    linear_cross_entropy,
    linear_kl_div,
    linear_log_probs,
    operators,
)
from cce_dist.parallel.collectives import rank_and_size

# neither needs a C++ compiler
BACKEND = "aot_eager"
METHODS = "recompute", "cached", "fused"


@pytest.fixture(autouse=True)
def _nothing_is_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert not operators._recorded


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


def compiled(function):
    return torch.compile(function, fullgraph=True, backend=BACKEND)


def gradients(outputs, leaves):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # not the same for all tokens, and no power of two
    upstream = [torch.linspace(0.3, 1.7, x.numel(), dtype=x.dtype, device=x.device).view(x.shape) for x in outputs]
    return torch.autograd.grad(outputs, leaves, upstream)


def assert_same(function, leaves, backend=BACKEND):
    """The same bits of ``function()`` and of its gradients, compiled in one graph and not."""
    # graphs of earlier checks count against torch's limit of recompilations
    torch._dynamo.reset()
    expected = function()
    found = torch.compile(function, fullgraph=True, backend=backend)()
    expected, found = (x if isinstance(x, tuple) else (x,) for x in (expected, found))
    assert len(expected) == len(found)
    for x, y in zip(expected, found, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    for x, y in zip(gradients(expected, leaves), gradients(found, leaves), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def check_options(device, names, reduction, method):
    inputs = make_inputs(13, 8, 150, device=device, bias="bias" in names, ignored=0.2)
    options = make_options([name for name in names if name != "bias"], inputs)
    leaves = [x for x in (*inputs, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]

    def step():
        return linear_cross_entropy(*inputs[:3], bias=inputs.bias, reduction=reduction, method=method, **options)

    assert_same(step, leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", [None, "bias", *OPTIONS])
def test_every_option(device, name, reduction) -> None:
    check_options(device, [] if name is None else [name], reduction, None)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(device, method) -> None:
    check_options(device, ["bias"], "sum", method)


def test_log_probs(device) -> None:
    inputs = make_inputs(13, 8, 150, device=device, bias=True, ignored=0.2)
    leaves = inputs.hidden, inputs.weight, inputs.bias
    assert_same(lambda: linear_log_probs(*inputs[:3], bias=inputs.bias), leaves)
    assert_same(lambda: linear_log_probs(*inputs[:3], bias=inputs.bias, return_entropy=True, softcap=2.5), leaves)


def test_divergence(device) -> None:
    student, teacher = make_inputs(13, 8, 150, device=device), make_inputs(13, 6, 150, device=device, seed=1)
    ids, probs = torch.randint(150, (13, 3), device=device), torch.rand(13, 3, device=device)
    given = teacher.hidden.detach(), teacher.weight.detach()
    assert_same(lambda: linear_kl_div(*student[:2], *given, divergence="reverse", reduction="none"), student[:2])
    assert_same(lambda: linear_kl_div(*student[:2], top_k=(ids, probs), mask=ids[:, 0] > 20), student[:2])


def test_statistics_have_no_gradient() -> None:
    inputs = make_inputs(13, 8, 150, ignored=0.2)

    def step():
        return linear_cross_entropy(*inputs[:3], return_stats=True, reduction="none")

    (loss, stats), (expected, theirs) = compiled(step)(), step()
    assert torch.equal(loss, expected)
    assert stats._fields == theirs._fields
    for ours, other in zip(stats, theirs, strict=True):
        assert torch.equal(ours, other)
        assert not ours.requires_grad


def test_modules_and_what_is_around_them() -> None:
    inputs = make_inputs(12, 8, 150)
    module = LinearCrossEntropyLoss(softcap=3.0)
    scale = torch.ones(8, requires_grad=True)

    def step():
        return 2 * module((inputs.hidden * scale).view(3, 4, 8), inputs.weight, inputs.targets.view(3, 4)).square()

    assert_same(step, (inputs.hidden, inputs.weight, scale))


def test_autocast() -> None:
    inputs = make_inputs(13, 8, 150, ignored=0.2)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(*inputs[:3], reduction="none")

    assert_same(step, inputs[:2])


def test_frozen_and_not_recorded() -> None:
    inputs = make_inputs(13, 8, 150)
    frozen = inputs.weight.detach()
    assert_same(lambda: linear_cross_entropy(inputs.hidden, frozen, inputs.targets), inputs[:1])
    with torch.no_grad():
        loss = compiled(linear_cross_entropy)(*inputs[:3])
        assert torch.equal(loss, linear_cross_entropy(*inputs[:3]))
    assert not loss.requires_grad
    assert not operators._recorded


def test_other_counts_of_tokens_are_the_same_graph() -> None:
    counter = CompileCounterWithBackend(BACKEND)

    @torch.compile(fullgraph=True, backend=counter)
    def step(hidden, weight, targets, denominator):
        return linear_cross_entropy(hidden, weight, targets, denominator=denominator)

    for n in (6, 7, 9, 12, 21, 30):
        inputs = make_inputs(n, 8, 150, seed=n)
        # as Hugging Face's num_items_in_batch: a tensor, or an int
        for denominator in (torch.tensor(float(n)), n + 2):
            step(*inputs[:3], denominator).backward()
            ours, _ = inputs.hidden.grad, inputs.weight.grad
            inputs.hidden.grad = inputs.weight.grad = None
            expected = linear_cross_entropy(*inputs[:3], denominator=denominator)
            assert torch.equal(ours, torch.autograd.grad(expected, inputs.hidden)[0])
    # of each kind of denominator: one for the first shapes, one for any
    assert counter.frame_count <= 4


def test_twice() -> None:
    inputs = make_inputs(13, 8, 150)
    with mock.patch.object(torch._functorch.config, "donated_buffer", False):
        loss = compiled(lambda: linear_cross_entropy(*inputs[:3], method="fused"))()
        first = torch.autograd.grad(loss, inputs[:2], retain_graph=True)
        assert not operators._recorded
        again = torch.autograd.grad(loss, inputs[:2])
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_forward_alone_leaves_nothing() -> None:
    inputs = make_inputs(13, 8, 150)
    step = compiled(lambda: linear_cross_entropy(*inputs[:3]))
    loss = step()
    assert len(operators._recorded) == 1
    del loss
    gc.collect()
    assert not operators._recorded


def test_checkpointed() -> None:
    inputs = make_inputs(13, 8, 150)

    def step():
        return torch.utils.checkpoint.checkpoint(
            lambda e: linear_cross_entropy(e.sin(), inputs.weight, inputs.targets), inputs.hidden, use_reentrant=False
        )

    assert_same(step, inputs[:2])


def test_errors_keep_their_types() -> None:
    inputs = make_inputs(13, 8, 150)
    step = compiled(linear_cross_entropy)
    with pytest.raises(ValueError, match="weight must have the shape"):
        step(inputs.hidden, inputs.weight[:, :4], inputs.targets)
    with pytest.raises(IndexError, match="targets must lie in"):
        step(inputs.hidden, inputs.weight, inputs.targets + 150)
    with pytest.raises(ValueError, match="reduction must be"):
        compiled(linear_cross_entropy)(*inputs[:3], reduction="average")


def check_sharded(group, device, layout):
    shard = getattr(VocabShard, layout)(150, group)
    whole = make_inputs(13, 8, 150, device=device, bias=True, ignored=0.2)
    weight = whole.weight.detach()[shard.start : shard.stop].clone().requires_grad_()

    for reduction, method in (("none", "cached"), ("mean", "fused"), ("sum", None)):
        assert_same(
            lambda reduction=reduction, method=method: linear_cross_entropy(
                whole.hidden, weight, whole.targets, shard=shard, reduction=reduction, method=method, z_loss=1e-2
            ),
            (whole.hidden, weight),
        )
    head = VocabParallelLMHead(8, 150, bias=True, shard=shard, device=device)
    assert_same(lambda: head.loss(whole.hidden, whole.targets), (whole.hidden, head.weight, head.bias))
    # of another shard another graph
    step = compiled(lambda shard: linear_cross_entropy(whole.hidden, weight, whole.targets, shard=shard))
    loss = step(shard)
    other = VocabShard(shard.start, shard.stop, 150, group)
    assert torch.equal(step(other), loss)


@pytest.mark.parametrize(("layout", "size"), [("even", 2), ("chunked", 3)])
def test_sharded(ranks, layout, size) -> None:
    ranks.run(check_sharded, layout, ranks=size)


def check_dtensors(group, device):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, device.type)
    inputs = make_inputs(4, 8, 20, device=device)
    weight = distribute_tensor(inputs.weight.detach(), mesh, [Shard(0)])
    with pytest.raises(Exception, match=r"weight is a DTensor: in torch.compile pass weight\.to_local"):
        compiled(linear_cross_entropy)(inputs.hidden, weight, inputs.targets)


def test_dtensors_are_refused(ranks) -> None:
    ranks.run(check_dtensors, ranks=2)


@contextmanager
def no_sync():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_sync(device, method, dtype, compile_it):
    inputs = make_inputs(300, 64, 1000, dtype, device=device, bias=True, ignored=0.2)
    step = torch.compile(linear_cross_entropy, fullgraph=True) if compile_it else linear_cross_entropy
    upstream = torch.full((), 0.7, device=device)

    def run():
        loss = step(*inputs[:3], bias=inputs.bias, method=method)
        return loss, torch.autograd.grad(loss, (inputs.hidden, inputs.weight, inputs.bias), upstream)

    # kernels are loaded
    expected = run()
    torch.cuda.synchronize()
    with no_sync():
        found = run()
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(x, y) for x, y in zip(found[1], expected[1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("method", [None, *METHODS])
def test_nothing_is_read_back(method, compile_it) -> None:
    check_no_sync(torch.device("cuda"), method, torch.bfloat16, compile_it)


def check_cuda_graph(device, step, tensors, group=None):
    """``step`` captured with one batch in ``tensors``, replayed with others: other targets, fewer tokens."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grads = step()
    hidden, weight, targets = tensors
    rank, size = rank_and_size(group)
    for seed, ignored in ((1, 0.0), (2, 0.9), (3, 1.0), (4, 0.5)):
        n, v = len(targets), len(weight) * size
        other = make_inputs(n, hidden.shape[1], v, torch.bfloat16, device=device, ignored=ignored, seed=seed)
        with torch.no_grad():
            hidden.copy_(other.hidden[: len(hidden)] if len(hidden) == n else other.hidden.chunk(size)[rank])
            weight.copy_(other.weight.chunk(size)[rank])
            targets.copy_(other.targets)
        graph.replay()
        expected, theirs = step()
        assert (targets == IGNORED).all() == (ignored == 1)
        assert torch.equal(loss, expected)
        assert all(torch.equal(x, y) for x, y in zip(grads, theirs, strict=True))


# as calls are by default, by each method, and with columns kept in the classifier's gradient
GRAPHS = {method: {} for method in (None, *METHODS)} | {"lent": SEAMS["cached"] | {"rows": 512}}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "names", [(), ("bias", "token_weight", "logit_scale", "softcap", "z_loss")], ids=["plain", "many"]
)
@pytest.mark.parametrize("method", GRAPHS)
def test_cuda_graphs(method, names) -> None:
    device = torch.device("cuda")
    inputs = make_inputs(300, 256, 1200, torch.bfloat16, device=device, bias="bias" in names, ignored=0.2)
    options = make_options([name for name in names if name != "bias"], inputs)
    if "token_weight" in options:
        # that of an ignored token is NaN, and the others of the replays are other ones
        options["token_weight"] = options["token_weight"].detach().nan_to_num(0.5)
    leaves = [
        x for x in (inputs.hidden, inputs.weight, inputs.bias, *options.values())
        if isinstance(x, torch.Tensor) and x.requires_grad
    ]  # fmt: skip

    def step():
        name = "cached" if method == "lent" else method
        with forced_plan(**GRAPHS[method]):
            loss = linear_cross_entropy(*inputs[:3], bias=inputs.bias, method=name, **options)
            return loss, torch.autograd.grad(loss, leaves)

    check_cuda_graph(device, step, inputs[:3])


def check_cuda_graph_of_ranks(group, device, method, sequence_parallel):
    rank, size = rank_and_size(group)
    whole = make_inputs(300, 256, 1200 * size, torch.bfloat16, device=device, ignored=0.2)
    shard = VocabShard.even(1200 * size, group, sequence_parallel=sequence_parallel)
    hidden = whole.hidden.detach()
    hidden = (hidden.chunk(size)[rank] if sequence_parallel else hidden).clone().requires_grad_()
    weight, targets = whole.weight.detach()[shard.start : shard.stop].clone().requires_grad_(), whole.targets

    def step():
        name = "cached" if method == "lent" else method
        with forced_plan(**GRAPHS[method]):
            loss = linear_cross_entropy(hidden, weight, targets, shard=shard, method=name)
            return loss, torch.autograd.grad(loss, (hidden, weight))

    check_cuda_graph(device, step, (hidden, weight, targets), group)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slices"])
@pytest.mark.parametrize("method", GRAPHS)
def test_cuda_graphs_of_ranks(ranks, method, sequence_parallel, size) -> None:
    """The collectives of NCCL among what is captured."""
    if not isinstance(ranks, JobRanks) or int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        pytest.skip("needs torchrun and a GPU for each of its ranks")
    ranks.run(check_cuda_graph_of_ranks, method, sequence_parallel, ranks=size)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [None, *METHODS])
def test_compiled_on_gpus(method) -> None:
    inputs = make_inputs(300, 64, 1000, torch.bfloat16, device="cuda", ignored=0.2)
    assert_same(lambda: linear_cross_entropy(*inputs[:3], method=method), inputs[:2], "inductor")
