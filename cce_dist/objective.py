"""What the options make of a token's loss and of its gradient by the logits: arithmetic of rows, in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kernels.logits import LogitMap
from .kernels.statistics import RowStatistics


@dataclass(frozen=True)
class Coefficients:
    """Of a row's gradient by the scaled product: ``(p (factor + log_factor log p) + uniform w - onehot ...) slope``.

    [N], in the statistics' dtype. ``entry`` is what the target's class gets, without ``uniform``, times its slope and
    formed without cancellation; ``target_slope`` is that slope. ``total`` is the sum of the row where its slope is 1.
    None stands for 0, of the slope for 1.
    """

    factor: torch.Tensor
    entry: torch.Tensor
    log_factor: torch.Tensor | None = None
    uniform: torch.Tensor | None = None
    target_slope: torch.Tensor | None = None
    total: torch.Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """The loss of a token, with ``w`` the classes' weights, ``W`` their sum over the K classes and ``t`` the target:

    ``(1 - smoothing) w_t (lse - x_t) + smoothing / K sum_j w_j (lse - x_j) + z_loss w_t lse^2``

    The first two terms are ``torch.nn.functional.cross_entropy``'s; the last is that of "PaLM: Scaling Language
    Modeling with Pathways" (Chowdhery et al., 2022). ``class_weight`` [K] fp32, None for weights of 1.
    """

    num_classes: int
    smoothing: float = 0.0
    z_loss: float = 0.0
    class_weight: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.smoothing == 0 and self.z_loss == 0 and self.class_weight is None

    def weights(self, ids: torch.Tensor) -> torch.Tensor | float:
        """Of the classes ``ids`` [N], fp64; any of those that are no class."""
        if self.class_weight is None:
            return 1.0
        return self.class_weight[ids.clamp(0, self.num_classes - 1)].double()

    def _total_weight(self) -> torch.Tensor | float:
        return float(self.num_classes) if self.class_weight is None else self.class_weight.double().sum()

    def uniform(self, grad: torch.Tensor) -> torch.Tensor:
        """What every class gets for each unit of its weight, beside its softmax: [N] -> [N]."""
        return grad * (-self.smoothing / self.num_classes)

    def loss(self, rows: RowStatistics, ids: torch.Tensor) -> torch.Tensor:
        """[N], in the statistics' dtype, of rows whose targets are ``ids``."""
        if self.plain:
            return rows.loss
        lse, weight = rows.row_max.double() + rows.log_sum.double(), self.weights(ids)
        loss = weight * ((1 - self.smoothing) * rows.loss.double() + self.z_loss * lse.square())
        if rows.total is not None:
            loss = loss + self.smoothing / self.num_classes * (self._total_weight() * lse - rows.total)
        return loss.to(rows.loss.dtype)

    def coefficients(
        self,
        rows: RowStatistics,
        ids: torch.Tensor,
        grad: torch.Tensor,
        logits: LogitMap,
        grad_entropy: torch.Tensor | None = None,
    ) -> Coefficients:
        """For the upstream gradients [N] of each row's loss and entropy. Rows where both are 0 get zeros, whatever
        their statistics."""
        dtype, nll = rows.loss.dtype, rows.loss
        used = grad != 0 if grad_entropy is None else (grad != 0) | (grad_entropy != 0)
        if self.plain and grad_entropy is None and logits.softcap is None:
            return Coefficients(grad, torch.where(used, torch.expm1(-nll) * grad, 0))
        nll = nll.double()
        lse, weight, p = rows.row_max.double() + rows.log_sum.double(), self.weights(ids), torch.exp(-nll)
        part = (1 - self.smoothing) * weight
        # what multiplies p beside the part that the target loses
        of_square = more = 2 * self.z_loss * weight * lse
        if self.smoothing:
            more = more + self.smoothing / self.num_classes * self._total_weight()
        factor, entry = grad * (part + more), grad * (part * torch.expm1(-nll) + more * p)
        log_factor = None
        if grad_entropy is not None:
            # dH/dx = -p (log p + H)
            assert rows.entropy is not None
            factor = factor - grad_entropy * rows.entropy.double()
            entry = entry - grad_entropy * p * (rows.entropy.double() - torch.where(p == 0, 0, nll))
            log_factor = torch.where(used, -grad_entropy, 0).to(dtype)
        slope = None if rows.logit is None else logits.slope(rows.logit.double())
        if slope is not None:
            entry = entry * slope
        uniform = None
        if self.smoothing:
            uniform = torch.where(used, self.uniform(grad), 0).to(dtype)
        # p sums to 1, dH/dx and what smoothing adds and takes to 0
        total = torch.where(used, grad * of_square, 0).to(dtype) if self.z_loss else None
        factor, entry = (torch.where(used, x, 0).to(dtype) for x in (factor, entry))
        return Coefficients(factor, entry, log_factor, uniform, slope, total)
