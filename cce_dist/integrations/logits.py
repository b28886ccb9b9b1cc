"""What stands for the logits in a model's forward: not computed, but what the model does to them is known."""

from __future__ import annotations

import numbers
from typing import Any

import torch

CURE = "call head_loss(head, hidden, targets) of cce_dist.integrations.deepspeed in a forward of your own"


class ChangedLogitsError(AttributeError, RuntimeError):
    """A model did something to its logits that the loss without logits does not have. An AttributeError too, since
    some libraries ask what attributes a tensor has."""


class Logits:
    """``cap * tanh(scale * x)``, or ``scale * x`` where ``cap`` is None, of the logits ``x`` of ``hidden`` [..., D].

    Its scale and its cap are what the model's own code does to it, not what a config says. Casts change nothing:
    the loss is computed in fp32. Whatever else it is asked for raises ``ChangedLogitsError``.
    """

    def __init__(self, hidden: torch.Tensor, vocab_size: int) -> None:
        self.hidden, self.vocab_size = hidden, vocab_size
        self.scale: Any = 1.0
        self.cap: float | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.hidden.shape[:-1], self.vocab_size])

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def options(self) -> dict[str, Any]:
        """Those of ``linear_cross_entropy`` that are of these logits."""
        if self.cap is None:
            return {"logit_scale": self.scale, "softcap": None}
        return {"logit_scale": self.scale * self.cap, "softcap": self.cap}

    def _same(self, *args: Any, **kwargs: Any) -> Logits:
        return self

    to = float = contiguous = _same

    def _copy(self) -> Logits:
        other = Logits(self.hidden, self.vocab_size)
        other.scale, other.cap = self.scale, self.cap
        return other

    def __imul__(self, factor: Any) -> Logits:
        if isinstance(factor, numbers.Real):
            factor = float(factor)
        elif not isinstance(factor, torch.Tensor) or factor.dim() or self.cap is not None:
            _refuse("a product with more than one number")
        if self.cap is None:
            self.scale = self.scale * factor
        else:
            self.cap = self.cap * factor
        return self

    def __itruediv__(self, divisor: Any) -> Logits:
        if not isinstance(divisor, (numbers.Real, torch.Tensor)):
            _refuse("a division by more than one number")
        # 30 / 30 is 1, 30 * (1 / 30) need not be
        if self.cap is None and isinstance(divisor, numbers.Real):
            self.scale = self.scale / float(divisor)
            return self
        return self.__imul__(1 / divisor)

    def __mul__(self, factor: Any) -> Logits:
        return self._copy().__imul__(factor)

    __rmul__ = mul = __mul__

    def __truediv__(self, divisor: Any) -> Logits:
        return self._copy().__itruediv__(divisor)

    div = __truediv__

    def tanh(self) -> Logits:
        if self.cap is not None:
            _refuse("a second tanh")
        other = self._copy()
        other.cap = 1.0
        return other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "tanh" and len(args) == 1 and not kwargs:
            return args[0].tanh()
        if name in ("mul", "__mul__", "__rmul__", "multiply") and len(args) == 2 and not kwargs:
            logits, factor = args if isinstance(args[0], cls) else reversed(args)
            return logits * factor
        if name in ("div", "true_divide", "divide") and len(args) == 2 and not kwargs and isinstance(args[0], cls):
            return args[0] / args[1]
        return _refuse(f"torch's {name}")

    def __getattr__(self, name: str) -> Any:
        _refuse(f"its {name}")


def _refuse(what: str) -> Any:
    raise ChangedLogitsError(
        f"the model changes or reads its logits between head and loss_function, by {what}: there are none. Only a "
        f"product with a number and a soft cap are known; {CURE}"
    )


def _refusal(name: str) -> Any:
    return lambda self, *args: _refuse(f"its {name}")


# Python looks these up on the class, past __getattr__
_OPERATORS = (
    "add radd iadd sub rsub isub rtruediv pow neg abs matmul rmatmul lt le gt ge getitem setitem len iter bool"
)
for _name in _OPERATORS.split():
    setattr(Logits, f"__{_name}__", _refusal(f"__{_name}__"))
