"""A model's forward that takes its loss from the head without logits: the mechanism of every integration.

While the model's own forward runs, a stand-in of its head answers with :class:`Logits`, which note what the model
does to them, and its ``loss_function`` calls the head's module for the loss. So the loss runs inside the forward of
the module that owns the weight: there ZeRO-3's and FSDP's hooks gather it, do so again in backward, and see its
gradient once.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from cce_dist.functional import TokenStats

from .adapters import active_module
from .heads import Head, find_head, whole_shape
from .logits import CURE, Logits
from .loss import MISSING, HeadLoss, put_back


class ModelForward:
    """``forward`` of a causal language model of Hugging Face's. An object, not a closure, so that a copy of the model
    has one of its own."""

    def __init__(self, model: nn.Module, head: str | nn.Module | None, loss: HeadLoss, skip_logits: bool | None):
        self.model, self.original = model, model.forward
        self.before = model.__dict__.get("forward", MISSING)
        self.configure(head, loss, skip_logits)
        # Trainer and generate look at the names of the arguments
        self.__signature__ = inspect.signature(model.forward)

    def configure(self, head: str | nn.Module | None, loss: HeadLoss, skip_logits: bool | None) -> None:
        self.head, self.loss, self.skip_logits, self.enabled = head, loss, skip_logits, True
        self.known: nn.Module | None = None
        self.found: Head | None = None

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        skip_logits = kwargs.pop("skip_logits", self.skip_logits)
        if not self.enabled:
            return self.original(*args, **kwargs)
        given = dict(self.__signature__.bind_partial(*args, **kwargs).arguments)
        given |= given.get("kwargs", {})
        labels, shift_labels = given.get("labels"), given.get("shift_labels")
        skip_logits = self.model.training if skip_logits is None else skip_logits
        if not skip_logits or (labels is None and shift_labels is None):
            return self.original(*args, **kwargs)
        if labels is None:
            # the model asks for a loss where there are labels only
            kwargs["labels"] = shift_labels
        model: Any = self.model
        check_loss_function(model)
        head, found = self._head()
        # hooks, as ZeRO's and FSDP's, hang on the head's module, not on its place
        place, _, key = found.name.rpartition(".")
        owner: Any = model.get_submodule(place)
        loss_function = _LossFunction(active_module(head), self.loss)
        before = model.__dict__.get("_loss_function", MISSING)
        owner._modules[key] = _StandIn(head, self.vocab_size)
        model._loss_function = loss_function
        try:
            output = self.original(*args, **kwargs)
        finally:
            owner._modules[key] = head
            put_back(model, "_loss_function", before)
        if not loss_function.asked:
            raise RuntimeError(
                f"model: {type(model).__name__}'s forward did not take its loss from loss_function; {CURE}"
            )
        return _without_logits(output, loss_function.stats)

    def _head(self) -> tuple[Any, Head]:
        # looked up in each call: AutoTP replaces it in deepspeed.initialize
        model: Any = self.model
        if isinstance(self.head, str):
            module = model.get_submodule(self.head)
        else:
            module = model.get_output_embeddings() if self.head is None else self.head
        if self.found is None or module is not self.known:
            self.found, self.known = find_head(model, self.head, self.loss.shard), module
            rows: Any = whole_shape(self.found.module.weight)[0]  # type: ignore[arg-type]
            self.vocab_size = rows if self.found.shard is None else self.found.shard.vocab_size
        return module, self.found

    def remove(self) -> None:
        """The model is as it was, also where something else has wrapped its forward since."""
        if self.model.__dict__.get("forward") is self:
            put_back(self.model, "forward", self.before)
        self.enabled = False


class _StandIn(nn.Module):
    """In the head's place while the model's forward runs: hidden [..., D] -> :class:`Logits`."""

    def __init__(self, head: nn.Module, vocab_size: int) -> None:
        super().__init__()
        # past nn.Module's registration: the head is no part of it
        self.__dict__["head"], self.vocab_size = head, vocab_size

    def forward(self, hidden: torch.Tensor) -> Any:
        return Logits(hidden, self.vocab_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["head"], name)


class _LossFunction:
    """The model's ``loss_function``, with the arguments of transformers' ``ForCausalLMLoss``."""

    def __init__(self, head: nn.Module, loss: HeadLoss) -> None:
        self.head, self.loss = head, loss
        self.asked = False
        self.stats: TokenStats | None = None

    def __call__(
        self,
        logits: Any,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        ignore_index: int | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not isinstance(logits, Logits):
            raise RuntimeError(f"the model changes its logits between head and loss_function, or has others; {CURE}")
        if vocab_size is not None and vocab_size != logits.vocab_size:
            raise ValueError(f"the model's loss is of {vocab_size} classes, its head has {logits.vocab_size} rows")
        if ignore_index is None:
            ignore_index = self.loss.options.get("ignore_index", -100)
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(logits.device)
        loss, self.stats = self.loss(
            self.head, logits.hidden, shift_labels, ignore_index=ignore_index, denominator=num_items_in_batch,
            **logits.options(),
        )  # fmt: skip
        self.asked = True
        return loss


def _without_logits(output: Any, stats: TokenStats | None) -> Any:
    """The model's output with tensors [..., 0] in place of logits, or the fields of ``stats``."""

    def empty(value: Any) -> Any:
        return value.hidden.new_empty(*value.shape[:-1], 0) if isinstance(value, Logits) else value

    if isinstance(output, tuple):
        if stats is None:
            return tuple(map(empty, output))
        return (*(value for value in output if not isinstance(value, Logits)), *stats)
    if stats is None:
        for name, value in output.items():
            output[name] = empty(value)
        return output
    output = type(output)(**{name: value for name, value in output.items() if not isinstance(value, Logits)})
    for name, value in stats._asdict().items():
        output[name] = value
    return output


def check_loss_function(model: Any) -> None:
    """``ValueError`` where the loss of ``model`` is another than that of the next token."""
    name, function = type(model).__name__, model.loss_function
    # DeepSpeed's is the same of a sharded head
    known = ("ForCausalLMLoss", "VocabParallelCausalLMLoss")
    kind = getattr(function, "__name__", type(function).__name__)
    if getattr(model.config, "is_encoder_decoder", False) or kind not in known:
        raise ValueError(
            f"model: {name} is no causal language model, whose labels are shifted by one: looked for ForCausalLMLoss "
            f"as the loss_function of a decoder, found {kind}; {CURE}"
        )


def find_model(model: Any) -> Any:
    """The causal language model in what wraps it (PEFT, DistributedDataParallel). Found by its structure:
    ``loss_function`` and ``get_output_embeddings``. None where there is none."""
    while not hasattr(type(model), "loss_function"):
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            model = model.module
        else:
            return None
    return model


def patch_model(
    model: Any, head: str | nn.Module | None, loss: HeadLoss, skip_logits: bool | None = None
) -> ModelForward:
    """Gives ``model``, which :func:`find_model` has found, its :class:`ModelForward`, or that one these options."""
    check_loss_function(model)
    own = loss.options.keys() & {"logit_scale", "softcap"}
    if own:
        raise TypeError(
            f"{sorted(own)}: a model of Hugging Face's scales and caps its logits itself, and so the loss"
        )
    current = model.__dict__.get("forward")
    if isinstance(current, ModelForward):
        current.configure(head, loss, skip_logits)
        return current
    model.forward = ModelForward(model, head, loss, skip_logits)
    return model.forward
