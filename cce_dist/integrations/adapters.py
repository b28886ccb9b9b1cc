"""What a head multiplies: its own weight, or with it that of PEFT's LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn


def is_lora(module: Any) -> bool:
    """Whether it is PEFT's LoRA of a linear layer that is not quantised."""
    return type(module).__name__ == "Linear" and type(module).__module__.startswith("peft.tuners.lora")


def check_lora(head: Any) -> None:
    """``TypeError`` for what the adapters of ``head`` do beside a product of low rank."""
    for name in _active(head):
        if name in head.lora_variant:
            raise TypeError(
                f"head: its adapter {name!r} is a {type(head.lora_variant[name]).__name__}, no plain LoRA"
            )
        if head.lora_bias[name]:
            raise TypeError(f"head: its adapter {name!r} has a bias (lora_bias=True)")


def operands(head: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``hidden`` [..., D] -> (hidden, weight, bias) whose product are the head's logits. With adapters of rank R the
    hidden states are [..., D + R] and the weight is a copy [V, D + R]: the sum of two products, as PEFT computes it,
    loses nothing in 16 bits, where a merged weight would round small changes away."""
    if not is_lora(head):
        return hidden, head.weight, head.bias
    base = head.base_layer
    columns, rows = [hidden], [base.weight]
    for name in _active(head):
        down, up = head.lora_A[name], head.lora_B[name].weight
        low = down(head.lora_dropout[name](hidden.to(down.weight.dtype))) * head.scaling[name]
        columns.append(low.to(hidden.dtype))
        rows.append(up.to(base.weight.dtype))
    if len(columns) == 1:
        return hidden, base.weight, base.bias
    return torch.cat(columns, -1), torch.cat(rows, -1), base.bias


def _active(head: Any) -> list[str]:
    if head.disable_adapters and head.merged:
        # as PEFT's forward does
        head.unmerge()
    if head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def active_module(module: Any) -> nn.Module:
    """What computes: the copy that PEFT trains instead of a module in ``modules_to_save``, else ``module`` itself."""
    if type(module).__name__ != "ModulesToSaveWrapper":
        return module
    if module.disable_adapters or not module.active_adapters:
        return module.original_module
    return module.modules_to_save[module.active_adapters[0]]
