"""The same in plain PyTorch, logits held whole: the truth that tests, docs and benchmarks measure against."""

from __future__ import annotations

from typing import Any

import torch


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias``, computed in ``dtype`` on whole logits.

    Takes the ``options`` of :func:`cce_dist.linear_cross_entropy` that have a meaning on one device; they are those
    of :func:`cross_entropy`. ``dtype`` is ``torch.float64`` for the truth, ``torch.float32`` for the materialised
    path that people run.
    """
    return cross_entropy(_product(hidden, weight, bias, dtype), targets, **options)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' log-probabilities and the entropies, likewise; see :func:`cce_dist.linear_log_probs`."""
    return log_probs(_product(hidden, weight, bias, dtype), targets, **options)


def cross_entropy(
    product: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    logit_scale: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The loss, in the dtype of ``product`` [..., vocab_size], of the logits that are made of it."""
    labels = targets.flatten().long()
    valid = labels != ignore_index
    labels = torch.where(valid, labels, 0)
    x = _logits(product, valid, logit_scale, softcap)
    log_p, lse = x.log_softmax(-1), x.logsumexp(-1)
    of_class = x.new_ones(x.shape[-1]) if class_weight is None else class_weight.to(x.dtype)
    weight = of_class[labels]

    losses = (1 - label_smoothing) * weight * -log_p.gather(-1, labels[:, None])[:, 0]
    if label_smoothing:
        # 0 times the infinite loss of an impossible class is not 0
        losses = losses - label_smoothing / x.shape[-1] * (of_class * log_p).sum(-1)
    if z_loss:
        losses = losses + z_loss * weight * lse.square()
    if token_weight is not None:
        of_token = torch.where(valid, token_weight.flatten().to(x.dtype), 0)
        losses, weight = losses * of_token, weight * of_token
    losses = torch.where(valid, losses, 0)
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    total, divisor = losses.sum(), torch.where(valid, weight, 0).sum()
    if denominator is not None:
        divisor = torch.as_tensor(denominator, device=x.device).to(x.dtype)
    # nothing that counts: 0, not 0 / 0
    nothing = (total == 0) & (divisor == 0)
    return torch.where(nothing, 0, total / torch.where(nothing, 1, divisor))


def log_probs(
    product: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    logit_scale: float | torch.Tensor = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of the target, entropy) of each token, in the dtype of ``product`` [..., vocab_size]."""
    labels = targets.flatten().long()
    valid = labels != ignore_index
    labels = torch.where(valid, labels, 0)
    log_p = _logits(product, valid, logit_scale, softcap).log_softmax(-1)
    of_target = log_p.gather(-1, labels[:, None])[:, 0]
    # an impossible class adds nothing: 0 times -inf is not 0
    entropy = -(log_p.exp() * torch.where(log_p == -torch.inf, 0, log_p)).sum(-1)
    of_target, entropy = (torch.where(valid, each, 0).view(targets.shape) for each in (of_target, entropy))
    return of_target, entropy


def _product(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    product = hidden.to(dtype) @ weight.to(dtype).T
    return product if bias is None else product + bias.to(dtype)


def _logits(
    product: torch.Tensor, valid: torch.Tensor, logit_scale: float | torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """[tokens, vocab_size]"""
    # an ignored row takes no part, whatever its hidden state holds
    x = torch.where(valid[:, None], product.flatten(0, -2), 0.0)
    x = x * (logit_scale.to(x.dtype) if isinstance(logit_scale, torch.Tensor) else logit_scale)
    return x if softcap is None else softcap * torch.tanh(x / softcap)
