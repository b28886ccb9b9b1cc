"""Knowledge distillation between two heads: validation and dispatch."""

from __future__ import annotations

import math
from typing import Any

import torch

from .autograd import SPARE, UNCOUNTED, DivergenceOptions, Divergences
from .distillation_input import (
    Head,
    autocast_head,
    validate_choices,
    validate_head,
    validate_ids,
    validate_pair,
    validate_shard,
    validate_teacher,
    validate_tokens,
)
from .kernels.rows import ROW_GROUP
from .kernels.runtime import round_up
from .operators import operator
from .parallel.agreement import agree
from .parallel.shard import VocabShard
from .validation import validate_denominator

# bytes of the panels where no budget is given
DEFAULT_PANELS = 512 << 20
# the rows of a panel from the most to the fewest, and the columns at least and at most: fewer leave multiprocessors
# idle, more gain nothing
PANEL_ROWS = (8192, 4096, 2048, 1024)
PANEL_COLUMNS = (512, 8192)


def _empty_divergence(student_hidden: torch.Tensor, reduction: str = "mean", **_: Any) -> list[torch.Tensor]:
    shape = student_hidden.shape[:-1] if reduction == "none" else ()
    wide = torch.promote_types(student_hidden.dtype, torch.float32)
    return [torch.empty(shape, dtype=wide, device=student_hidden.device)]


@operator(_empty_divergence)
def linear_kl_div(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    *,
    top_k: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    divergence: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    shard: VocabShard | None = None,
    memory_budget: int | str | None = None,
) -> torch.Tensor:
    """Divergence of a student's distribution over the vocabulary from a teacher's, neither's logits held whole.

    A head's logits are ``x = hidden @ weight.T + bias``, then ``softcap tanh(x / softcap)``, then
    ``x / temperature``.
    With ``q`` the student's softmax and ``p`` the teacher's, a token's loss is

    - ``"forward"``: ``KL(p || q) = sum p (log p - log q)`` (Hinton et al., 2015),
    - ``"reverse"``: ``KL(q || p)`` (Gu et al., 2024),
    - ``"jensen_shannon"``: ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q`` (Agarwal et
      al., 2024).

    The usual factor ``temperature**2`` on the loss, for gradients that keep their size, is the caller's.

    Args:
        student_hidden: ``[..., D]``, float32, bfloat16, float16, or float64 on CPUs. Equal on all ranks of
            ``shard.group``.
        student_weight: ``[V, D]``, student_hidden's dtype: the classifier, or this rank's rows of it where ``shard``
            says so.
        teacher_hidden: ``[..., D']``, of the student's leading shape. The teacher may have another width and dtype
            than the student, though float64 for both or neither. Nothing of it may require gradients.
        teacher_weight: ``[V, D']``, teacher_hidden's dtype: the same rows of the same vocabulary.
        top_k: in place of the teacher's head ``(ids [..., K], probabilities [..., K])``, int64 (or int32) class ids
            of the whole vocabulary and the teacher's probabilities, whole on every rank. The loss is
            ``sum_k p_k (log p_k - log q[id_k])``, with the probabilities as they are given, which need not sum to 1;
            what has the probability 0 adds nothing, ids may repeat. For ``"forward"`` alone.
        mask: ``[...]``, bool, equal on all ranks: the tokens that count, None for all. The others are not computed
            and add nothing to the loss and to any gradient, even where their hidden states are NaN.
        beta: the teacher's share of ``m``, between 0 and 1.
        temperature: above 0.
        student_bias, teacher_bias: ``[V]``, their hidden's dtype, sharded as the weights are.
        student_softcap, teacher_softcap: above 0, or None for none.
        reduction: ``"mean"`` over the tokens that count (0 where there are none), ``"sum"``, or ``"none"``.
        denominator: a number or 0-d tensor that replaces the count of tokens in ``"mean"``.
        shard: which rows of the vocabulary the weights hold, and the group whose ranks hold the others. The ranks'
            upstream gradients must be equal, as the losses are.
        memory_budget: bytes of workspace, beyond the inputs and their gradients, that a rank may use; ``"min"`` for
            as little as there can be. None: 512 MiB and a copy of the hidden states.

    Returns:
        fp32 (fp64 for fp64 inputs): ``[]``, or the leading shape for ``"none"``. The same on every rank. In backward
        ``student_hidden`` gets its whole gradient on every rank, ``student_weight`` and ``student_bias`` that of
        their rows, each accumulated in fp32 and rounded once to its dtype. Under autocast the inputs are cast as
        ``torch.nn.functional.linear`` casts them.

    Raises:
        ValueError: shapes that do not fit, a teacher that requires gradients, both ``top_k`` and a teacher's head or
            neither, ``top_k`` with another divergence than ``"forward"``, an unknown divergence or reduction, numbers
            out of their range, a budget that nothing fits, a shard that is not the weights' or is sequence parallel,
            ranks that disagree. On every rank of the group, before any work starts; where the group works on GPUs, in
            the first call with a shard and these shapes only.
        TypeError: arguments of the wrong type or dtype, DTensors, likewise.
        IndexError: an id of ``top_k`` outside the vocabulary, on CPUs. On GPUs that token's loss is NaN.
    """
    given = shard if isinstance(shard, VocabShard) else None
    error: Exception | None = None
    student: Head = (student_hidden, student_weight, student_bias)
    teacher: Head = (teacher_hidden, teacher_weight, teacher_bias)
    try:
        validate_choices(divergence, beta, temperature, student_softcap, teacher_softcap, reduction, memory_budget)
        validate_teacher(teacher, top_k, divergence)
        student, teacher = autocast_head("student", student), autocast_head("teacher", teacher)
        hidden, weight, bias = validate_head("student", student)
        if teacher_hidden is not None:
            validate_pair(hidden, weight, *validate_head("teacher", teacher)[:2])
        validate_tokens(hidden, top_k, mask)
        if denominator is not None:
            validate_denominator(denominator, reduction, hidden.device)
        shard = validate_shard(weight, shard)
        validate_ids(top_k, mask, shard)
        rows, columns = _panel_shape(hidden, weight, teacher[0], top_k, memory_budget)
    except (ValueError, TypeError, IndexError) as problem:
        error = problem
    same = {} if error is not None else {
        "the shape of student_hidden": tuple(hidden.shape),
        "the dtype of student_hidden": str(hidden.dtype),
        "requires_grad of student_hidden": hidden.requires_grad,
        "the shape of teacher_hidden": None if teacher[0] is None else tuple(teacher[0].shape),
        "the shape of top_k": None if top_k is None else tuple(top_k[0].shape),
        "the presence of mask": mask is not None,
        "the presence of biases": (bias is not None, teacher_bias is not None),
        "divergence": (divergence, beta),
        "temperature": temperature,
        "softcaps": (student_softcap, teacher_softcap),
        "whether reduction is none": reduction == "none",
        "whether gradients are recorded": torch.is_grad_enabled(),
    }  # fmt: skip
    device = student_hidden.device if isinstance(student_hidden, torch.Tensor) else torch.device("cpu")
    # data-parallel ranks that are taken for tensor-parallel ones have other tokens
    if top_k is None:
        agree(given, same, device, error, targets=mask, tokens="mask")
    else:
        agree(given, same, device, error, targets=top_k[0], tokens="the ids of top_k")
    assert isinstance(shard, VocabShard)

    shape, num_tokens = hidden.shape[:-1], math.prod(hidden.shape[:-1])
    counted = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
    labels = torch.where(counted.reshape(-1), 0, UNCOUNTED)
    options = DivergenceOptions(
        shard=shard, kind=divergence if top_k is None else "top_k", beta=float(beta), temperature=float(temperature),
        softcaps=(student_softcap, teacher_softcap), rows=rows, columns=columns,
    )  # fmt: skip
    top_ids, top_probs = (None, None) if top_k is None else (x.reshape(num_tokens, -1) for x in top_k)
    losses = Divergences.apply(
        *_matrices((hidden, weight, bias)), *_matrices(teacher), top_ids, top_probs, labels, options
    )
    if reduction == "none":
        return losses.view(shape)
    total = losses.sum(dtype=torch.float64)
    if reduction == "mean":
        count = counted.sum()
        divisor: float | torch.Tensor = count
        if denominator is not None:
            divisor = denominator if isinstance(denominator, torch.Tensor) else float(denominator)
        # without a token the loss is 0, whatever the denominator
        total = total / torch.where(count == 0, torch.ones_like(total), divisor)
    return total.to(losses.dtype)


def _matrices(head: Head) -> Head:
    """A head as the kernels take it: tokens in one dimension, rows that are contiguous."""
    hidden, weight, bias = head
    if hidden is None or weight is None:
        return head
    rows = weight if weight.stride(-1) == 1 or weight.numel() == 0 else weight.contiguous()
    return hidden.reshape(-1, hidden.shape[-1]), rows, None if bias is None else bias.contiguous()


def _panel_shape(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor | None,
    top_k: tuple[torch.Tensor, torch.Tensor] | None,
    memory_budget: int | str | None,
) -> tuple[int, int]:
    """(rows, columns) of a panel that the budget has room for."""
    n = max(ROW_GROUP, round_up(math.prod(hidden.shape[:-1]), ROW_GROUP))
    wide = torch.promote_types(hidden.dtype, torch.float32).itemsize
    narrow = hidden.dtype.itemsize
    # the packed rows, the gradient of the student's, and the numbers of a row, some of them in fp64
    token = hidden.shape[-1] * (narrow + wide) + 200
    token += 0 if teacher is None else teacher.shape[-1] * teacher.dtype.itemsize
    token += 0 if top_k is None else top_k[0].shape[-1] * 48
    element = wide * (1 if teacher is None else 2) + (narrow if narrow < wide else 0)
    least, most = PANEL_COLUMNS
    # smaller ones leave most of a GPU idle
    heights = PANEL_ROWS if hidden.device.type == "cpu" else PANEL_ROWS[:2]
    least = least if hidden.device.type == "cpu" else min(4 * least, most)

    def needed(rows: int, columns: int) -> int:
        # a 16-bit weight's gradient grows in full precision where the tokens come in several panels
        sums = columns * hidden.shape[-1] * wide if rows < n and narrow < wide else 0
        return n * token + rows * (columns + SPARE) * element + sums

    smallest = min(n, heights[-1]), least
    if memory_budget == "min":
        return smallest
    budget = memory_budget if isinstance(memory_budget, int) else n * token + DEFAULT_PANELS
    for rows in heights:
        rows = min(n, rows)
        for columns in range(min(most, round_up(max(1, len(weight)), least)), 0, -least):
            if needed(rows, columns) <= budget:
                return rows, columns
    raise ValueError(
        f"memory_budget: nothing fits {budget} bytes of workspace; {needed(*smallest)} are needed at least"
    )
