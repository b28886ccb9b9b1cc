"""Inputs of the loss, the same for a seed on every rank and device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

IGNORED = -100
# what changes a token's loss or its part in the result
OPTIONS = ("token_weight", "class_weight", "logit_scale", "softcap", "label_smoothing", "z_loss")
# what can have a gradient, in the order of the tests' lists of gradients
TRAINABLE = ("hidden", "weight", "bias", "logit_scale", "token_weight")


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


def make_options(
    names: Collection[str], inputs: Inputs, *, frozen: Collection[str] = (), seed: int = 2
) -> dict[str, Any]:
    """Values that make a difference, of the options ``names``. Some classes and one token weigh nothing, an ignored
    token NaN. Tensors ask for gradients where the library has them, but for those ``frozen``."""
    generator = torch.Generator().manual_seed(seed)
    device, wide = inputs.hidden.device, torch.promote_types(inputs.hidden.dtype, torch.float32)
    of_token = torch.rand(inputs.targets.shape, generator=generator, dtype=torch.float64) + 0.5
    of_class = torch.rand(len(inputs.weight), generator=generator, dtype=torch.float64) + 0.25
    of_token.view(-1)[-1:] = 0
    of_token[inputs.targets.cpu() == IGNORED] = torch.nan
    of_class[3::7] = 0
    values: dict[str, Any] = {
        "token_weight": of_token.to(device, wide).requires_grad_("token_weight" not in frozen),
        "class_weight": of_class.to(device, wide),
        "logit_scale": torch.tensor(0.7, dtype=wide, device=device, requires_grad="logit_scale" not in frozen),
        "softcap": 2.5,
        "label_smoothing": 0.15,
        "z_loss": 0.02,
    }
    return {name: values[name] for name in names}


def trained(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that ask for gradients, by name."""
    tensors = {**inputs._asdict(), **options}
    found = {name: tensors.get(name) for name in TRAINABLE}
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor) and x.requires_grad}


def gradients_of(
    results: torch.Tensor | tuple[torch.Tensor, ...],
    inputs: Inputs,
    options: Mapping[str, Any],
    upstream: Any = None,
    **how: Any,
) -> list[torch.Tensor | None]:
    """Those of TRAINABLE, None where none is asked for."""
    tensors = trained(inputs, options)
    found = dict(zip(tensors, torch.autograd.grad(results, [*tensors.values()], upstream, **how), strict=True))
    return [found.get(name) for name in TRAINABLE]
