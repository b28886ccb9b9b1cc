"""The modules: loss, vocabulary-parallel head and embedding, alone and over groups."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from inputs import make_inputs
from shards import shard_of, whole_of
from tolerance import assert_gradients, assert_loss

from cce_dist import LinearCrossEntropyLoss, VocabParallelEmbedding, VocabParallelLMHead


def test_loss_module_binds_options() -> None:
    inputs = make_inputs(9, 8, 30, ignored=0.3)
    loss = LinearCrossEntropyLoss(reduction="sum")
    assert_loss(loss(*inputs[:3]).detach(), inputs, reduction="sum")
    assert_loss(loss(*inputs[:3], reduction="none").detach(), inputs, reduction="none")
    assert "reduction='sum'" in repr(loss)
    assert not loss.state_dict()


def check_init(group, device, layout):
    for make, init in (
        (lambda **k: VocabParallelLMHead(24, 5000, bias=True, **k), "head"),
        (lambda **k: VocabParallelEmbedding(24, 5000, padding_idx=7, **k), "embedding"),
    ):
        torch.manual_seed(5)
        one = make(device=device)
        after_one = torch.rand(())
        torch.manual_seed(5)
        shard = shard_of(layout, 5000, group)
        many = make(shard=shard, device=device)
        assert torch.equal(torch.rand(()), after_one), "the ranks' generators part"
        for (name, whole), (_, local) in zip(one.named_parameters(), many.named_parameters(), strict=True):
            assert torch.equal(whole_of(local, shard), whole), f"{init} {name}"
            assert (local[shard.classes :] == 0).all()
    bound = 24**-0.5
    torch.manual_seed(5)
    weight = VocabParallelLMHead(24, 5000).weight
    assert weight.abs().max() <= bound
    assert abs(weight.std().item() - bound / math.sqrt(3)) < 0.01 * bound


@pytest.mark.parametrize("layout", ["even", "chunked", "padded"])
def test_initial_values_do_not_depend_on_the_group(ranks, layout) -> None:
    ranks.run(check_init, layout, ranks=3)


def check_head(group, device, layout):
    inputs = make_inputs(12, 24, 101, device=device, bias=True, ignored=0.2)
    linear = torch.nn.Linear(24, 101, device=device)
    with torch.no_grad():
        linear.weight.copy_(inputs.weight)
        linear.bias.copy_(inputs.bias)
    shard = shard_of(layout, 101, group)
    head = VocabParallelLMHead.from_linear(linear, shard=shard)
    hidden = inputs.hidden.detach().requires_grad_()
    loss = head.loss(hidden, inputs.targets)
    assert_loss(loss.detach(), inputs)
    loss.backward()
    gradients = [hidden.grad, whole_of(head.weight.grad, shard), whole_of(head.bias.grad, shard)]
    assert_gradients(gradients, inputs)
    # the gathered logits, and the same gradients through them
    hidden = inputs.hidden.detach().requires_grad_()
    head.zero_grad()
    logits = head(hidden.view(3, 4, 24))
    assert logits.shape == (3, 4, 101)
    F.cross_entropy(logits.flatten(0, 1), inputs.targets).backward()
    gradients = [hidden.grad, whole_of(head.weight.grad, shard), whole_of(head.bias.grad, shard)]
    assert_gradients(gradients, inputs)


@pytest.mark.parametrize("layout", ["even", "chunked", "padded"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_head(ranks, layout, size) -> None:
    ranks.run(check_head, layout, ranks=size)


def check_embedding(group, device, layout, padding_idx, vocab_size):
    torch.manual_seed(0)
    plain = torch.nn.Embedding(vocab_size, 24, padding_idx=padding_idx, device=device)
    shard = shard_of(layout, vocab_size, group)
    many = VocabParallelEmbedding.from_embedding(plain, shard=shard)
    ids = torch.randint(vocab_size, (3, 40), generator=torch.Generator().manual_seed(1)).to(device)
    out, expected = many(ids), plain(ids)
    assert torch.equal(out, expected)
    upstream = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(2)).to(device)
    out.backward(upstream)
    expected.backward(upstream)
    assert torch.allclose(whole_of(many.weight.grad, shard), plain.weight.grad, rtol=1e-6, atol=1e-6)
    assert (many.weight.grad[shard.classes :] == 0).all()
    if device.type == "cpu":
        ids[0, 0] = vocab_size
        with pytest.raises(IndexError, match=f"got {vocab_size}"):
            many(ids)


@pytest.mark.parametrize("layout", ["even", "chunked", "padded"])
@pytest.mark.parametrize(("padding_idx", "vocab_size"), [(None, 101), (3, 101), (-1, 101), (None, 3)])
def test_embedding(ranks, layout, padding_idx, vocab_size) -> None:
    ranks.run(check_embedding, layout, padding_idx, vocab_size, ranks=4)


def check_tied(group, device):
    torch.manual_seed(0)
    head = VocabParallelLMHead(24, 101, group=group, device=device)
    embedding = VocabParallelEmbedding.tied_to(head)
    assert embedding.weight is head.weight
    whole = whole_of(head.weight, head.shard).double().requires_grad_()
    ids = torch.randint(101, (30,), generator=torch.Generator().manual_seed(1)).to(device)
    targets = ids.roll(-1)
    head.loss(embedding(ids), targets).backward()
    F.cross_entropy(F.embedding(ids, whole) @ whole.T, targets).backward()
    error = (whole_of(head.weight.grad, head.shard).double() - whole.grad).norm() / whole.grad.norm()
    assert error < 1e-6, error


def test_tied_weights(ranks) -> None:
    ranks.run(check_tied, ranks=3)


def check_copies(group, device):
    head = VocabParallelLMHead(16, 301, group=group, device=device)
    again = copy.deepcopy(head)
    assert again.shard.group is group
    assert again.weight is not head.weight
    assert torch.equal(again.weight, head.weight)


def test_sharded_modules_can_be_copied(ranks) -> None:
    ranks.run(check_copies, ranks=2)
