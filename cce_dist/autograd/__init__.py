"""The operation: kernels and collectives in their order. The only part that knows both."""

from .divergence import SPARE, UNCOUNTED, DivergenceOptions, Divergences
from .operands import LossInputs, LossOptions, MainGrad, TokenValues
from .tokens import TokenLosses
from .total import TotalLoss

__all__ = [
    "SPARE",
    "UNCOUNTED",
    "DivergenceOptions",
    "Divergences",
    "LossInputs",
    "LossOptions",
    "MainGrad",
    "TokenLosses",
    "TokenValues",
    "TotalLoss",
]
