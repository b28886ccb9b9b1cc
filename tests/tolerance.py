"""Every tolerance of the tests.

The truth is the reference in fp64. A result may be off by what its yardstick is off:

- 16-bit gradients: the same loss on whole fp32 logits, its gradients rounded once to their dtype. ``FACTOR`` above it
  is the promise for a trained model's tokens. Where many tokens are confident of a wrong class, the operands
  of the tensor cores decide: ``dx`` but for the targets' entries is rounded to 16 bits once as well, and the same
  yardstick with that one rounding applies.
- fp32 gradients: the same loss on whole fp32 logits. Two orders of the same sums differ: ratios of 0.7 to 1.1 were
  seen wherever many tokens average out, hence ``FACTOR_FP32``. Where few do, chance may favour the yardstick tenfold,
  and what is left is what one rounding of the result, 2**-23, and one of the largest logit can do: a logit of size x
  is off by x * 2**-24, and so is its exponential in relation to itself.
- fp64: 1e-12, thousands of its roundings.
- losses: ``LOSS`` relative to torch's cross_entropy on fp32 logits and to the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from inputs import Inputs

from cce_dist import reference

FACTOR = 1.08
FACTOR_FP32 = 1.25
FLOOR_FP32 = 2.0**-23
# the largest error of an element, against the yardstick's largest: two roundings that meet
FACTOR_ELEMENT = 2.0
LOSS = 1e-5
FP64 = 1e-12

Yardstick = Literal["output", "operands"]


def assert_loss(loss: torch.Tensor, inputs: Inputs, **options: Any) -> None:
    """``loss`` is the truth's, and torch's on fp32 logits, and has the right dtype and shape."""
    wide = torch.promote_types(inputs.hidden.dtype, torch.float32)
    assert loss.dtype == wide, f"the loss is {loss.dtype}"
    with torch.no_grad():
        clean = _without_ignored(inputs, options)
        truth = _reference(clean, torch.float64, options)
        assert loss.shape == truth.shape, f"the loss has the shape {tuple(loss.shape)}, expected {tuple(truth.shape)}"
        _assert_close_losses(loss, truth, "the reference in fp64")
        if "denominator" not in options and (clean.targets != options.get("ignore_index", -100)).any():
            x = F.linear(
                clean.hidden.to(wide), clean.weight.to(wide), None if clean.bias is None else clean.bias.to(wide)
            )
            theirs = F.cross_entropy(
                x.flatten(0, -2), clean.targets.flatten().long(), ignore_index=options.get("ignore_index", -100),
                reduction=options.get("reduction", "mean"),
            )  # fmt: skip
            _assert_close_losses(loss, theirs.view(loss.shape), "torch's cross_entropy")


def _assert_close_losses(loss: torch.Tensor, expected: torch.Tensor, whose: str) -> None:
    # relative for losses above 1; an fp32 logit of some size leaves an absolute error in a loss near 0
    error = (loss.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    assert bool((error <= LOSS).all()), f"the loss is {error.max():.2e} off that of {whose}"


def assert_gradients(
    gradients: Sequence[torch.Tensor | None],
    inputs: Inputs,
    upstream: torch.Tensor | None = None,
    *,
    yardstick: Yardstick = "operands",
    **options: Any,
) -> None:
    """``gradients`` of hidden, weight and bias (None: not asked for) for the loss's ``upstream`` gradient."""
    clean = _without_ignored(inputs, options)
    truth = reference_gradients(clean, upstream, torch.float64, options)
    yard = reference_gradients(clean, upstream, torch.float32, options)
    coarse = _gradients_of_rounded_operands(clean, upstream, options) if yardstick == "operands" else None
    with torch.no_grad():
        x = clean.hidden.double() @ clean.weight.double().T
        x = x if clean.bias is None else x + clean.bias.double()
        # -inf is exact
        largest = float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0
    for index, name in enumerate(("hidden", "weight", "bias")):
        gradient = gradients[index]
        if gradient is None:
            continue
        tensor = inputs[index] if index < 2 else inputs.bias
        assert tensor is not None
        assert gradient.dtype == tensor.dtype, f"the gradient of {name} is {gradient.dtype}, expected {tensor.dtype}"
        assert gradient.shape == tensor.shape, f"the gradient of {name} has the shape {tuple(gradient.shape)}"
        candidates = [yard[index]] if coarse is None or coarse[index] is None else [yard[index], coarse[index]]
        assert_gradient(gradient, truth[index], candidates, name, largest_logit=largest)


def assert_gradient(
    gradient: torch.Tensor,
    truth: torch.Tensor,
    yardsticks: Sequence[torch.Tensor],
    name: str = "a tensor",
    *,
    largest_logit: float = 0.0,
) -> None:
    """``gradient`` is as near to ``truth`` as the worst of ``yardsticks``, rounded to its dtype, in norm (which is
    the RMS of its elements) and in its worst element."""
    error = (gradient.double() - truth).abs()
    assert bool(error.isfinite().all()), f"the gradient of {name} is not finite"
    if gradient.numel() == 0:
        return
    yards = [(yard.to(gradient.dtype).double() - truth).abs() for yard in yardsticks]
    norm, largest = truth.norm(), truth.abs().max()
    if gradient.dtype == torch.float64:
        bound, bound_element = FP64 * norm, FP64 * largest
    else:
        bound, bound_element = max(yard.norm() for yard in yards), max(yard.max() for yard in yards)
        if gradient.dtype == torch.float32:
            floor = FLOOR_FP32 + largest_logit * 2.0**-24
            bound, bound_element = FACTOR_FP32 * bound + floor * norm, bound_element + floor * largest
        else:
            bound = FACTOR * bound
        bound_element = FACTOR_ELEMENT * bound_element
    assert error.norm() <= bound, (
        f"the gradient of {name} is {error.norm() / norm:.3e} off in norm, allowed {bound / norm:.3e}"
    )
    assert error.max() <= bound_element, (
        f"an element of the gradient of {name} is {error.max():.3e} off, allowed {bound_element:.3e}"
    )


def reference_gradients(
    inputs: Inputs, upstream: torch.Tensor | None, dtype: torch.dtype, options: dict[str, Any]
) -> list[torch.Tensor]:
    """The reference's gradients of hidden, weight and bias, in ``dtype``."""
    leaves = [
        None if x is None else x.detach().to(dtype).requires_grad_()
        for x in (inputs.hidden, inputs.weight, inputs.bias)
    ]
    hidden, weight, bias = leaves
    assert hidden is not None
    assert weight is not None
    loss = _reference(Inputs(hidden, weight, inputs.targets, bias), dtype, options)
    loss.backward(None if upstream is None else upstream.detach().to(dtype))
    return [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]


def _gradients_of_rounded_operands(
    inputs: Inputs, upstream: torch.Tensor | None, options: dict[str, Any]
) -> list[torch.Tensor | None] | None:
    """Gradients in fp32 but for ``dx``, which is rounded once to the inputs' 16 bits, except the targets' entries,
    for fp16 in units of the power of two at the largest weight of a token; None for other dtypes."""
    dtype = inputs.hidden.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    hidden, weight = inputs.hidden.detach().float().flatten(0, -2), inputs.weight.detach().float()
    x = hidden @ weight.T
    if inputs.bias is not None:
        x = x + inputs.bias.detach().float()
    losses = torch.zeros(inputs.targets.numel(), requires_grad=True)
    # what a token's loss weighs in the result
    reduced = _reduced(losses, inputs.targets, options)
    (token,) = torch.autograd.grad(reduced, losses, None if upstream is None else upstream.detach().float().cpu())
    token = token.to(x.device)
    valid = inputs.targets.flatten() != options.get("ignore_index", -100)
    token = torch.where(valid, token, 0)
    scale = 1.0
    if dtype == torch.float16:
        scale = 2.0 ** (torch.frexp(token.abs().max()).exponent.clamp(-100, 128) - 14)
    exact = x.softmax(-1)
    exact[valid, inputs.targets.flatten()[valid].long()] -= 1
    exact *= token[:, None]
    dx = (exact / scale).to(dtype).float() * scale
    hit = valid.nonzero()[:, 0], inputs.targets.flatten()[valid].long()
    dx[hit] = exact[hit]
    return [(dx @ weight).view_as(inputs.hidden), dx.T @ hidden, None]


def _reduced(losses: torch.Tensor, targets: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    reduction, denominator = options.get("reduction", "mean"), options.get("denominator")
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    count = (targets != options.get("ignore_index", -100)).sum().clamp(min=1).cpu()
    return losses.sum() / (count if denominator is None else torch.as_tensor(denominator).cpu())


def _reference(inputs: Inputs, dtype: torch.dtype, options: dict[str, Any]) -> torch.Tensor:
    return reference.linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.targets.long(), bias=inputs.bias, dtype=dtype, **options
    )


def _without_ignored(inputs: Inputs, options: dict[str, Any]) -> Inputs:
    """Zeros where a token is ignored: its hidden state takes no part, and 0 * NaN would spoil the reference."""
    ignored = inputs.targets == options.get("ignore_index", -100)
    return inputs._replace(hidden=inputs.hidden.detach().masked_fill(ignored[..., None], 0))
