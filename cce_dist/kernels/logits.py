"""From a product to logits: bias, scale and softcap, in this order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .runtime import tl, triton
from .tiles import LOG2E


@dataclass(frozen=True)
class LogitMap:
    """``x = softcap tanh(scale (product + bias) / softcap)``; what is None is left out.

    ``bias`` [V], ``scale`` [] fp32 (fp64 for fp64 operands), ``softcap`` a positive number.
    """

    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    softcap: float | None = None

    def __getitem__(self, classes: slice) -> LogitMap:
        """That of a range of classes."""
        return self if self.bias is None else replace(self, bias=self.bias[classes])

    @property
    def flags(self) -> dict[str, bool]:
        """What :func:`as_logits` asks for."""
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_SCALE": self.scale is not None,
            "HAS_SOFTCAP": self.softcap is not None,
        }

    def apply_(self, product: torch.Tensor, classes: slice, slope: bool = False) -> torch.Tensor | None:
        """In place, for the columns [n, classes]. Returns the derivative of logits by ``scale (product + bias)``,
        None for 1 and where no ``slope`` is asked for."""
        if self.bias is not None:
            product += self.bias[classes].to(product.dtype)
        return self.scaled_(product, slope)

    def scaled_(self, logits: torch.Tensor, slope: bool = False) -> torch.Tensor | None:
        """What is left after the bias, likewise."""
        if self.scale is not None:
            logits *= self.scale
        if self.softcap is None:
            return None
        logits.div_(self.softcap).tanh_()
        slopes = 1 - logits.square() if slope else None
        logits.mul_(self.softcap)
        return slopes

    def slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """That derivative, from the logits themselves."""
        return None if self.softcap is None else 1 - (logits / self.softcap).square_()


@triton.jit
def as_logits(
    x, bias_ptr, scale_ptr, softcap, offs_v, V,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The logits, but for the factor ``softcap`` where they are capped: in ``FULL`` precision, or as exact as logits
    of the cap's size can be, by half of the instructions."""
    if HAS_BIAS:
        x += tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        x *= tl.load(scale_ptr)
    if HAS_SOFTCAP:
        x = tanh(x * (1.0 / softcap)) if FULL else 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E / softcap)) + 1.0)
    return x


@triton.jit
def tanh(y):
    """Within two units in the last place; the hardware's own has eleven bits."""
    square = y * y
    # near 0 the difference below would cancel: the fit of (tanh(y) / y - 1) / y**2 by a polynomial
    near = 0.0200923 - 0.0051393 * square
    near = near * square - 0.0535588
    near = near * square + 0.133291
    near = near * square - 0.3333319
    size = tl.abs(y)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2E)) + 1.0)
    return tl.where(size < 0.7, y + y * (square * near), tl.where(y < 0, -far, far))
