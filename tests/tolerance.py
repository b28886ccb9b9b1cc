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
- the gradient of a factor of all logits, one number, whose yardstick can be right by chance: as fp32 gradients, what
  is left in relation to the sum of its terms' magnitudes, of which there is one a logit. It comes of the products of
  the tensor cores, so with 16-bit inputs ``dx`` but for the targets' entries has been rounded once: a random error of
  each term but its bias's, of which ``DEVIATIONS`` standard deviations are allowed. Where all entries are about the
  same, as near a uniform softmax, so are their errors, and the yardstick is the one with that rounding.
- fp64: 1e-12, thousands of its roundings.
- losses, log-probabilities and entropies, and so the gradients of tokens' weights, which are losses: ``LOSS``
  relative to torch's cross_entropy on fp32 logits and to the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from inputs import TRAINABLE, Inputs

from cce_dist import reference

FACTOR = 1.08
FACTOR_FP32 = 1.25
FLOOR_FP32 = 2.0**-23
# the largest error of an element, against the yardstick's largest: two roundings that meet
FACTOR_ELEMENT = 2.0
DEVIATIONS = 4.0
LOSS = 1e-5
FP64 = 1e-12

Yardstick = Literal["output", "operands"]
# of (product, targets, **options): the loss, or several results at once
Function = Callable[..., Any]
Upstream = torch.Tensor | Sequence[torch.Tensor] | None


def assert_loss(loss: torch.Tensor, inputs: Inputs, **options: Any) -> None:
    """``loss`` is the truth's, and torch's on fp32 logits, and has the right dtype and shape."""
    wide = torch.promote_types(inputs.hidden.dtype, torch.float32)
    assert loss.dtype == wide, f"the loss is {loss.dtype}"
    with torch.no_grad():
        clean = _without_ignored(inputs, options)
        truth = reference.cross_entropy(_product(clean, torch.float64), clean.targets, **options)
        assert loss.shape == truth.shape, f"the loss has the shape {tuple(loss.shape)}, expected {tuple(truth.shape)}"
        _assert_close(loss, truth, "the loss", "that of the reference in fp64")
        theirs = _torch_cross_entropy(clean, wide, options)
        if theirs is not None:
            _assert_close(loss, theirs.view(loss.shape), "the loss", "that of torch's cross_entropy")


def _torch_cross_entropy(inputs: Inputs, dtype: torch.dtype, options: Mapping[str, Any]) -> torch.Tensor | None:
    """Where torch has the options, and a mean."""
    ignore_index, class_weight = options.get("ignore_index", -100), options.get("class_weight")
    valid = inputs.targets[inputs.targets != ignore_index].long()
    if not options.keys().isdisjoint(("denominator", "token_weight", "z_loss")) or not len(valid):
        return None
    if class_weight is not None:
        class_weight = class_weight.to(dtype)
        if class_weight[valid].sum() == 0:
            return None
    x = F.linear(
        inputs.hidden.to(dtype), inputs.weight.to(dtype), None if inputs.bias is None else inputs.bias.to(dtype)
    )
    x = x * options.get("logit_scale", 1.0)
    softcap = options.get("softcap")
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return F.cross_entropy(
        x.flatten(0, -2), inputs.targets.flatten().long(), weight=class_weight, ignore_index=ignore_index,
        reduction=options.get("reduction", "mean"), label_smoothing=options.get("label_smoothing", 0.0),
    )  # fmt: skip


def assert_log_probs(log_probs: torch.Tensor, entropy: torch.Tensor | None, inputs: Inputs, **options: Any) -> None:
    """Both are the truth's, and have the right dtype and shape."""
    wide = torch.promote_types(inputs.hidden.dtype, torch.float32)
    with torch.no_grad():
        clean = _without_ignored(inputs, options)
        truth = reference.log_probs(_product(clean, torch.float64), clean.targets, **options)
    for name, ours, theirs in zip(("log-probability", "entropy"), (log_probs, entropy), truth, strict=True):
        if ours is not None:
            assert (ours.dtype, ours.shape) == (wide, theirs.shape), f"the {name} is {ours.dtype}, {ours.shape}"
            _assert_close(ours, theirs, f"the {name}", "that of the reference in fp64")


def _assert_close(ours: torch.Tensor, expected: torch.Tensor, name: str, whose: str) -> None:
    # relative above 1; an fp32 logit of some size leaves an absolute error in a loss near 0
    error = (ours.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    assert bool((error <= LOSS).all()), f"{name} is {error.max():.2e} off {whose}"


def assert_gradients(
    gradients: Sequence[torch.Tensor | None],
    inputs: Inputs,
    upstream: Upstream = None,
    *,
    yardstick: Yardstick = "operands",
    function: Function = reference.cross_entropy,
    **options: Any,
) -> None:
    """``gradients`` of hidden, weight and bias, and where they are options of logit_scale and token_weight (None: not
    asked for), for the ``upstream`` gradient of the loss, or of all that ``function`` returns."""
    clean = _without_ignored(inputs, options)
    truth, yard = (
        _gradients_of(function, clean, upstream, dtype, options) for dtype in (torch.float64, torch.float32)
    )
    coarse = _gradients_of_rounded_operands(function, clean, upstream, options) if yardstick == "operands" else {}
    with torch.no_grad():
        x = reference._logits(
            _product(clean, torch.float64), _valid(clean, options), options.get("logit_scale", 1.0),
            options.get("softcap"),
        )  # fmt: skip
        # -inf is exact
        largest = float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0
    for name, gradient in zip(TRAINABLE, gradients, strict=False):
        if gradient is None:
            continue
        tensor = getattr(inputs, name) if name in Inputs._fields else options[name]
        assert tensor is not None
        assert gradient.dtype == tensor.dtype, f"the gradient of {name} is {gradient.dtype}, expected {tensor.dtype}"
        assert gradient.shape == tensor.shape, f"the gradient of {name} has the shape {tuple(gradient.shape)}"
        if name == "token_weight":
            fixed = _gradients_of(function, clean, upstream, torch.float64, _with_divisor(clean, options))
            _assert_token_weight_gradient(gradient, truth[name], fixed[name].abs().max(), inputs.hidden.dtype)
        elif name == "logit_scale":
            terms = _scale_terms(function, clean, upstream, options)
            yards = [yard[name], coarse[name]] if name in coarse else [yard[name]]
            _assert_scale_gradient(gradient, truth[name], yards, terms, largest, inputs.hidden.dtype)
        else:
            candidates = [yard[name]] if name not in coarse else [yard[name], coarse[name]]
            assert_gradient(gradient, truth[name], candidates, name, largest_logit=largest)


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
            # the largest of many errors is less of an average still
            bound, bound_element = FACTOR_FP32 * bound + floor * norm, bound_element + 2 * floor * largest
        else:
            bound = FACTOR * bound
        bound_element = FACTOR_ELEMENT * bound_element
    assert error.norm() <= bound, (
        f"the gradient of {name} is {error.norm() / norm:.3e} off in norm, allowed {bound / norm:.3e}"
    )
    assert error.max() <= bound_element, (
        f"an element of the gradient of {name} is {error.max():.3e} off, allowed {bound_element:.3e}"
    )


def _assert_scale_gradient(
    gradient: torch.Tensor,
    truth: torch.Tensor,
    yards: Sequence[torch.Tensor],
    terms: tuple[torch.Tensor, torch.Tensor],
    largest_logit: float,
    computed: torch.dtype,
) -> None:
    """``terms``: what ``truth`` is the sum of, and of that what comes of rounded numbers; ``computed``: the dtype of
    the hidden states."""
    assert bool(gradient.isfinite()), "the gradient of logit_scale is not finite"
    magnitude = terms[0].abs().sum()
    if computed == torch.float64:
        bound = FP64 * magnitude
    else:
        bound = FACTOR_FP32 * max((yard.to(gradient.dtype).double() - truth).abs() for yard in yards)
        bound += (FLOOR_FP32 + largest_logit * 2.0**-24) * magnitude + truth.abs() * _unit(gradient.dtype)
        if computed in (torch.bfloat16, torch.float16):
            # errors are spread evenly over a last place, of two units of the number at most
            bound += DEVIATIONS * _unit(computed) / 3**0.5 * terms[1].norm()
    error = (gradient.double() - truth).abs()
    assert error <= bound, f"the gradient of logit_scale is {error:.3e} off {truth:.3e}, allowed {bound:.3e}"


def _assert_token_weight_gradient(
    gradient: torch.Tensor, truth: torch.Tensor, size: torch.Tensor, computed: torch.dtype
) -> None:
    """``size``: the largest of the losses that it is made of."""
    error = (gradient.double() - truth).abs()
    allowed = FP64 if computed == torch.float64 else LOSS + _unit(gradient.dtype)
    assert bool((error <= allowed * size).all()), (
        f"an element of the gradient of token_weight is {error.max() / size:.3e} off, allowed {allowed:.3e}"
    )


def _unit(dtype: torch.dtype) -> float:
    """The largest error of a rounding in relation to the number."""
    return torch.finfo(dtype).eps / 2


def reference_gradients(
    inputs: Inputs, upstream: Upstream, dtype: torch.dtype, options: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The reference's gradients of hidden, weight and bias (where there is one), in ``dtype``."""
    found = _gradients_of(reference.cross_entropy, inputs, upstream, dtype, options)
    return [found[name] for name in ("hidden", "weight", "bias") if name in found]


def _gradients_of(
    function: Function, inputs: Inputs, upstream: Upstream, dtype: torch.dtype, options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """By the names of the tensors, in ``dtype``; an option's where it asks for one."""
    tensors = {"hidden": inputs.hidden, "weight": inputs.weight, "bias": inputs.bias}
    tensors |= {name: x for name, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in tensors.items() if x is not None}
    product = _product(Inputs(leaves["hidden"], leaves["weight"], inputs.targets, leaves.get("bias")), dtype)
    options = {**options, **{name: leaves[name] for name in options if name in leaves}}
    results = function(product, inputs.targets, **options)
    found = torch.autograd.grad(_tuple(results), [*leaves.values()], _like(upstream, results))
    return dict(zip(leaves, found, strict=True))


def _gradients_of_rounded_operands(
    function: Function, inputs: Inputs, upstream: Upstream, options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Gradients of hidden, weight and logit_scale, in fp32 but for ``dx``, which is rounded once to the inputs' 16
    bits, except the targets' entries, for fp16 in units of the power of two at the largest weight of a token; none
    for other dtypes."""
    dtype = inputs.hidden.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return {}
    hidden, weight = inputs.hidden.detach().float().flatten(0, -2), inputs.weight.detach().float()
    valid, labels = _valid(inputs, options), inputs.targets.flatten().long()
    factor, scaled = _apart(_product(inputs, torch.float32), options)
    exact = _gradient_of_product(function, scaled, inputs.targets, upstream, options).flatten(0, -2)
    scale = 1.0
    if dtype == torch.float16:
        largest = torch.where(valid, _weights_of_tokens(inputs, upstream, options), 0).abs().max()
        scale = 2.0 ** (torch.frexp(largest).exponent.clamp(-100, 128) - 14)
    dx = (exact / scale).to(dtype).float() * scale
    hit = valid.nonzero()[:, 0], labels[valid]
    dx[hit] = exact[hit]
    # of the factor, which multiplies the bias in full precision
    product, whole = (
        _product(x, torch.float32).detach().flatten(0, -2) for x in (inputs._replace(bias=None), inputs)
    )
    of_factor = (dx * product).sum(dtype=torch.float64) + (exact * (whole - product)).sum(dtype=torch.float64)
    dx = dx * factor
    return {"hidden": (dx @ weight).view_as(inputs.hidden), "weight": dx.T @ hidden, "logit_scale": of_factor}


def _apart(product: torch.Tensor, options: Mapping[str, Any]) -> tuple[Any, torch.Tensor]:
    """(logit_scale, the product times it, without a graph)"""
    scale = options.get("logit_scale", 1.0)
    scale = scale.detach().to(product.dtype) if isinstance(scale, torch.Tensor) else scale
    return scale, product.detach() * scale


def _gradient_of_product(
    function: Function, product: torch.Tensor, targets: torch.Tensor, upstream: Upstream, options: Mapping[str, Any]
) -> torch.Tensor:
    """Of a ``product`` that has had its factor."""
    product = product.requires_grad_()
    results = function(product, targets, **{**options, "logit_scale": 1.0})
    (found,) = torch.autograd.grad(_tuple(results), product, _like(upstream, results))
    return found


def _scale_terms(
    function: Function, inputs: Inputs, upstream: Upstream, options: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gradient of logit_scale is the sum of: each logit's gradient times what the factor multiplies. And
    the part of it that products of rounded numbers have: not the targets', nor the bias's."""
    product = _product(inputs, torch.float64).detach()
    _, scaled = _apart(product, options)
    dx = _gradient_of_product(function, scaled, inputs.targets, upstream, options)
    valid = _valid(inputs, options)
    terms, labels = (dx * product).flatten(0, -2)[valid], inputs.targets.flatten()[valid].long()[:, None]
    # a bias has its part in full precision
    rounded = (dx * _product(inputs._replace(bias=None), torch.float64).detach()).flatten(0, -2)[valid]
    return terms, rounded.scatter(1, labels, 0)


def _weights_of_tokens(inputs: Inputs, upstream: Upstream, options: Mapping[str, Any]) -> torch.Tensor:
    """What each token's loss weighs in the result; of several results, the largest of their gradients."""
    if isinstance(upstream, Sequence):
        return torch.stack([each.detach().float().flatten().abs() for each in upstream]).amax(0)
    targets, device = inputs.targets, inputs.targets.device
    losses, weight = torch.zeros(targets.numel(), device=device, requires_grad=True), _valid(inputs, options).float()
    if options.get("class_weight") is not None:
        weight = weight * options["class_weight"].float()[torch.where(weight != 0, targets.flatten().long(), 0)]
    if options.get("token_weight") is not None:
        weight = torch.where(weight != 0, weight * options["token_weight"].detach().float().flatten(), 0)
    reduced, reduction = losses * weight, options.get("reduction", "mean")
    reduced = reduced.view(targets.shape) if reduction == "none" else reduced.sum()
    if reduction == "mean":
        divisor = options.get("denominator")
        reduced = reduced / (weight.sum() if divisor is None else torch.as_tensor(divisor).to(device))
    return torch.autograd.grad(reduced, losses, *_like(upstream, reduced))[0]


def _with_divisor(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Any]:
    """A mean's divisor as a constant: with it, the gradient of token_weight is the losses. Without it, it is their
    difference from the mean, whose error is still that of the losses."""
    if options.get("reduction", "mean") != "mean" or options.get("denominator") is not None:
        return dict(options)
    valid = _valid(inputs, options)
    weight = options["token_weight"].detach().flatten()[valid].double()
    if options.get("class_weight") is not None:
        weight = weight * options["class_weight"][inputs.targets.flatten()[valid].long()]
    return {**options, "denominator": weight.sum()}


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _like(upstream: Upstream, results: Any) -> list[torch.Tensor | None]:
    """The upstream gradients of ``results``, in their dtype and on their device."""
    results = _tuple(results)
    given = [*upstream] if isinstance(upstream, Sequence) else [upstream] * len(results)
    return [None if g is None else g.detach().to(r.device, r.dtype) for g, r in zip(given, results, strict=True)]


def _product(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    return reference._product(inputs.hidden, inputs.weight, inputs.bias, dtype)


def _valid(inputs: Inputs, options: Mapping[str, Any]) -> torch.Tensor:
    return inputs.targets.flatten() != options.get("ignore_index", -100)


def _without_ignored(inputs: Inputs, options: Mapping[str, Any]) -> Inputs:
    """Zeros where a token is ignored: its hidden state takes no part, and 0 * NaN would spoil the reference."""
    ignored = inputs.targets == options.get("ignore_index", -100)
    return inputs._replace(hidden=inputs.hidden.detach().masked_fill(ignored[..., None], 0))
