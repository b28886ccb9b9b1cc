"""A user's project with every public name, as ``mypy --strict`` reads it and as tests/test_packaging.py runs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cce_dist import (
    LinearCrossEntropyLoss,
    Plan,
    TokenStats,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabParallelLMHead,
    VocabShard,
    linear_cross_entropy,
    linear_kl_div,
    linear_log_probs,
    plan,
)


def losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = linear_cross_entropy(hidden, weight, labels, reduction="sum", softcap=30.0)
    both: tuple[Tensor, TokenStats] = linear_cross_entropy(hidden, weight, labels, return_stats=True)
    accuracy: Tensor = (both[1].argmax == labels).float().mean()
    log_probs: Tensor = linear_log_probs(hidden, weight, labels)
    policy: tuple[Tensor, Tensor] = linear_log_probs(hidden, weight, labels, return_entropy=True)
    divergence: Tensor = linear_kl_div(hidden, weight, hidden.detach(), weight.detach())
    return loss + both[0] + accuracy + log_probs.mean() + policy[1].mean() + divergence


def sizes() -> int:
    chosen: Plan = plan(64, 32, 100, device="cpu", memory_budget="min")
    method: str = chosen.method
    return chosen.peak + len(method)


class Model(nn.Module):
    def __init__(self, shard: VocabShard) -> None:
        super().__init__()
        self.head = VocabParallelLMHead(32, shard.vocab_size, shard=shard)
        self.embedding = VocabParallelEmbedding.tied_to(self.head)
        self.criterion = LinearCrossEntropyLoss(label_smoothing=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        loss: Tensor = self.head.loss(hidden[:, :-1], ids[:, 1:])
        again: Tensor = self.criterion(hidden[:, :-1], self.head.weight, ids[:, 1:])
        return loss + again


def styles() -> dict[str, VocabParallelHead]:
    return {"lm_head": VocabParallelHead()}


def mistakes(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Each comment is an error of its own where the types say nothing."""
    number: float = linear_cross_entropy(hidden, weight, labels)  # type: ignore[assignment]
    pair: tuple[Tensor, Tensor] = linear_log_probs(hidden, weight, labels)  # type: ignore[assignment]
    linear_cross_entropy(hidden, weight, [1, 2])  # type: ignore[call-overload]
    plan("many", 32, 100)  # type: ignore[arg-type]
    linear_kl_div(hidden, weight, temperature="hot")  # type: ignore[arg-type]
    VocabShard.even("whole", None)  # type: ignore[arg-type]
    print(number, pair)


if __name__ == "__main__":
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
    gradients = torch.autograd.grad(losses(hidden, weight, torch.arange(5)), (hidden, weight))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert Model(VocabShard.even(100, None))(torch.randint(100, (2, 8))) > 0
    assert sizes() > 0
    assert styles()
