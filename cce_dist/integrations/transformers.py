"""The loss inside Hugging Face's models: :func:`patch` is the one call.

Nothing of it knows a model's name. The head is what ``get_output_embeddings`` returns; what the model's own code does
to the logits, a scale or a soft cap, is seen as it does it; whatever else is refused.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from cce_dist.parallel.shard import VocabShard

from .heads import Head, find_head
from .loss import OPTIONS, HeadLoss
from .model import ModelForward, find_model, patch_model

__all__ = ["Patch", "patch", "unpatch"]
_OPTIONS = OPTIONS - {"logit_scale", "softcap"} | {"return_stats"}


class Patch:
    """A patched model: its ``head``, and the way back. As a context manager it is one for the block."""

    def __init__(self, forward: ModelForward, head: Head) -> None:
        self._forward, self.head = forward, head

    def unpatch(self) -> None:
        """The model is as it was, also where something else has wrapped its forward since. Twice is once."""
        self._forward.remove()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        head = self.head
        tied = f", tied to {head.tied_to}" if head.tied_to else ""
        rows = f", rows {head.shard.start}:{head.shard.stop} of {head.shard.vocab_size}" if head.shard else ""
        return f"Patch({type(self._forward.model).__name__}: {head.name}, {head.layout}{rows}{tied})"


def patch(
    model: Any,
    shard: VocabShard | None = None,
    *,
    head: str | nn.Module | None = None,
    skip_logits: bool | None = None,
    **options: Any,
) -> Patch:
    """Makes a causal language model of Hugging Face's compute its loss without logits.

    With ``labels`` [B, T] int64 (shifted here), or ``shift_labels`` [B, T] beside or instead of them (as they are),
    the output's ``loss`` is fp32, []: the mean over the labels that are not ignored, or with ``num_items_in_batch``,
    a number or 0-d tensor, their sum divided by it; and what the model itself adds, as the balancing loss of experts.
    Its ``logits`` are an empty tensor [B, T, 0]. With ``logits_to_keep`` pass ``shift_labels`` [B, K] of the kept
    positions. Without labels, as in generation, the model is as it was; so it is in eval mode, whose logits are often
    asked for, unless ``skip_logits`` says otherwise.

    Args:
        model: in training or eval mode; PEFT's and DistributedDataParallel's wrappers are looked into. A copy of it
            is patched as well.
        shard: this rank's rows, of a head that is a plain ``torch.nn.Linear`` of these rows only; the model's logits
            are its own matter then. A head of DTensors (transformers' ``tp_plan="auto"``), of AutoTP's, or of
            ``shard_head``'s says itself which rows it has.
        head: the linear layer that makes the logits, or its name; None: ``get_output_embeddings()``. LoRA on it is
            computed.
        skip_logits: True for the loss without logits in eval mode as well, False for logits in training, None for
            the one in training and the other in eval mode. An argument of that name of a call,
            ``model(..., skip_logits=True)``, is of that call.
        options: of :func:`cce_dist.linear_cross_entropy`, those that are no token's: ``ignore_index``,
            ``label_smoothing``, ``z_loss``, ``memory_budget``, ``method`` and so on. With ``return_stats=True`` the
            output has, in place of ``logits``, the fields of :class:`cce_dist.TokenStats`, each [B, T], of the token
            after it: evaluation without logits.

    Raises:
        ValueError: a model whose loss is not that of the next token, no head, a head whose rows are not known, a
            ``shard`` that is not the head's, weights that are not there.
        TypeError: what is no such model, an option that does not exist or that is the model's own (``logit_scale``,
            ``softcap``), a head that does more than a linear layer, as quantised ones and adapters other than LoRA.
        RuntimeError: in the first forward, a model that changes its logits otherwise than by a scale and a soft cap,
            or does not take its loss from ``loss_function``.
    """
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"unknown options {sorted(unknown)}; patch takes {sorted(_OPTIONS)}")
    if hasattr(model, "zero_optimization_stage"):
        raise TypeError("model is DeepSpeed's engine: call prepare(engine) of cce_dist.integrations.deepspeed")
    if hasattr(model, "_orig_mod"):
        raise TypeError("model is compiled: patch it before torch.compile")
    if not isinstance(model, nn.Module) or (causal := find_model(model)) is None:
        raise TypeError(
            "model: looked for a causal language model of Hugging Face's, by its loss_function and "
            f"get_output_embeddings, found {type(model).__name__}"
        )
    found = find_head(causal, head, shard)
    return Patch(patch_model(causal, head, HeadLoss(options, None, shard, engine=False), skip_logits), found)


def unpatch(model: Any) -> None:
    """Undoes :func:`patch`; ``ValueError`` where ``model`` is not patched."""
    causal = find_model(model)
    forward = getattr(causal, "__dict__", {}).get("forward")
    if not isinstance(forward, ModelForward):
        raise ValueError(f"model: the forward of {type(model).__name__} is not patched")
    forward.remove()
