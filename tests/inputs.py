"""Inputs of the loss, the same for a seed on every rank and device."""

from __future__ import annotations

from typing import NamedTuple

import torch

IGNORED = -100


class Inputs(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor | None


def make_inputs(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    bias: bool | float = False,
    spread: float = 1.0,
    ignored: float = 0.0,
    seed: int = 0,
) -> Inputs:
    """Leaves that ask for gradients. ``spread`` is the standard deviation of the logits, ``ignored`` the share of
    tokens that are ignored, ``bias`` whether there is one, or its value in every column."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(n, d), normal(v, d) * (spread / d**0.5)
    targets = torch.randint(v, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < ignored] = IGNORED
    row = normal(v) * spread if bias is True else torch.full((v,), float(bias), dtype=torch.float64)

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype).requires_grad_()

    return Inputs(leaf(hidden), leaf(weight), targets.to(device), leaf(row) if bias is not False else None)


def make_trained_inputs(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    bias: bool | float = False,
    ignored: float = 0.0,
) -> Inputs:
    """As a trained model meets them: half of the tokens confident, losses from 1e-5 to 14."""
    inputs = make_inputs(n, d, v, dtype, device=device, bias=bias)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        strength = (torch.rand(n, generator=generator) * 8 + 10).to(device)
        strength[::2] = 0
        inputs.hidden.copy_(1.5 * inputs.hidden.float() + strength[:, None] * inputs.weight.float()[inputs.targets])
        inputs.targets[(torch.rand(n, generator=generator) < ignored).to(device)] = IGNORED
    return inputs


def make_upstream(loss: torch.Tensor) -> torch.Tensor | None:
    """The gradient of each token's loss, the same on every rank; None where the loss is one number."""
    if loss.dim() == 0:
        return None
    return torch.rand(loss.shape, generator=torch.Generator().manual_seed(1)).to(loss.device)
