"""Two heads' logits compared, a panel at a time: the sums of each row, and the gradient of the first head's logits.

``s`` and ``t`` [n, width] are a panel of student's and teacher's logits of the rows from ``row0``, in fp32; rows at
or past ``count`` hold anything. ``q`` and ``p`` are their softmaxes, ``m = beta p + (1 - beta) q``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .config import PASS
from .runtime import cdiv, tl, triton, triton_serves

# elements of a row that a program takes at once
BLOCK = 1024


def rescaled(
    maximum: torch.Tensor, total: torch.Tensor, expectation: torch.Tensor, new: torch.Tensor, expect: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, expectation) relative to the maxima ``new`` [H, n], which are no smaller (see
    :func:`add_statistics`)."""
    after = torch.where(new == -math.inf, 0, new)
    factor = torch.exp(maximum - after)
    kept = total * factor
    if expect is not None:
        shift = torch.where(maximum == -math.inf, 0, maximum) - after
        moved = factor[expect] * expectation + kept[expect] * (shift[expect] - shift[1 - expect])
        # nothing is left of what weighs nothing, whatever its logarithms were
        expectation = torch.where(kept[expect] == 0, 0, moved)
    return kept, expectation


@triton.jit
def _statistics_kernel(
    s_ptr, t_ptr, count_ptr, max_ptr, total_ptr, expect_ptr, N, width, row0, stride_s, stride_t,
    HAS_T: tl.constexpr, EXPECT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = row0 + n
    if row < tl.load(count_ptr):
        max_s = tl.load(max_ptr + row)
        total_s = tl.load(total_ptr + row)
        max_t = max_s
        total_t = total_s
        expectation = total_s * 0.0
        if HAS_T:
            max_t = tl.load(max_ptr + N + row)
            total_t = tl.load(total_ptr + N + row)
            expectation = tl.load(expect_ptr + row)
        for v in range(0, width, BLOCK):
            offs_v = v + tl.arange(0, BLOCK)
            s = tl.load(s_ptr + n * stride_s + offs_v, mask=offs_v < width, other=float("-inf"))
            new_s = tl.maximum(max_s, tl.max(s, 0))
            after_s = tl.where(new_s == float("-inf"), 0.0, new_s)
            factor_s = tl.exp(max_s - after_s)
            s -= after_s
            exp_s = tl.exp(s)
            if HAS_T:
                t = tl.load(t_ptr + n * stride_t + offs_v, mask=offs_v < width, other=float("-inf"))
                new_t = tl.maximum(max_t, tl.max(t, 0))
                after_t = tl.where(new_t == float("-inf"), 0.0, new_t)
                factor_t = tl.exp(max_t - after_t)
                t -= after_t
                exp_t = tl.exp(t)
                # see rescaled
                shift = tl.where(max_s == float("-inf"), 0.0, max_s) - after_s
                shift -= tl.where(max_t == float("-inf"), 0.0, max_t) - after_t
                if EXPECT == 1:
                    kept = total_t * factor_t
                    moved = factor_t * expectation - kept * shift
                    new = tl.sum(tl.where(exp_t == 0, 0.0, exp_t * (t - s)), 0)
                    expectation = tl.where(kept == 0, 0.0, moved) + new
                if EXPECT == 0:
                    kept = total_s * factor_s
                    moved = factor_s * expectation + kept * shift
                    new = tl.sum(tl.where(exp_s == 0, 0.0, exp_s * (s - t)), 0)
                    expectation = tl.where(kept == 0, 0.0, moved) + new
                total_t = total_t * factor_t + tl.sum(exp_t, 0)
                max_t = new_t
            total_s = total_s * factor_s + tl.sum(exp_s, 0)
            max_s = new_s
        tl.store(max_ptr + row, max_s)
        tl.store(total_ptr + row, total_s)
        if HAS_T:
            tl.store(max_ptr + N + row, max_t)
            tl.store(total_ptr + N + row, total_t)
            tl.store(expect_ptr + row, expectation)


def add_statistics(
    s: torch.Tensor,
    t: torch.Tensor | None,
    count: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    expectation: torch.Tensor,
    *,
    row0: int,
    expect: int | None,
) -> None:
    """Folds a panel into each head's ``maximum`` and ``total``, the sum of ``exp(x - maximum)``, [H, N], and into
    ``expectation`` [N], the sum of ``exp(x_w - maximum_w) ((x_w - maximum_w) - (x_o - maximum_o))`` for the head
    ``w`` = ``expect`` and the other one (0 the student's, 1 the teacher's; None for no such sum). A maximum of -inf
    counts as 0, and so does the product of a weight of 0. ``s`` and ``t`` are scratch."""
    if triton_serves(s):
        if s.numel():
            _statistics_kernel[(len(s),)](
                s, t, count, maximum, total, expectation, maximum.shape[1], s.shape[1], row0, s.stride(0),
                0 if t is None else t.stride(0), HAS_T=t is not None, EXPECT=-1 if expect is None else expect,
                BLOCK=BLOCK,
            )  # fmt: skip
        return
    for piece, rows in _pieces(s, count, row0):
        panels = [x[piece] for x in (s, t) if x is not None]
        new = torch.maximum(maximum[:, rows], torch.stack([x.amax(1) for x in panels]))
        total[:, rows], expectation[rows] = rescaled(maximum[:, rows], total[:, rows], expectation[rows], new, expect)
        maximum[:, rows] = new
        for x, top in zip(panels, new, strict=True):
            x.sub_(torch.where(top == -math.inf, 0, top)[:, None])
        difference = None if expect is None else panels[expect] - panels[1 - expect]
        for x, sums in zip(panels, total, strict=True):
            sums[rows] += x.exp_().sum(1)
        if expect is not None and difference is not None:
            expectation[rows] += _weighted_sum(panels[expect], difference)


@triton.jit
def _log_mixture(log_q, log_p, log_rest, log_beta):
    a = log_q + log_rest
    b = log_p + log_beta
    high = tl.maximum(a, b)
    log_m = high + tl.log(1.0 + tl.exp(tl.minimum(a, b) - tl.where(high == float("-inf"), 0.0, high)))
    # the maximum passes over a NaN
    return tl.where(b != b, b, log_m)


@triton.jit
def _mixture_kernel(
    s_ptr, t_ptr, count_ptr, max_ptr, log_sum_ptr, out_ptr, N, width, row0, stride_s, stride_t, log_rest, log_beta,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = row0 + n
    if row < tl.load(count_ptr):
        max_s = tl.load(max_ptr + row)
        max_t = tl.load(max_ptr + N + row)
        log_sum_s = tl.load(log_sum_ptr + row)
        log_sum_t = tl.load(log_sum_ptr + N + row)
        sum_s = tl.load(out_ptr + row)
        sum_t = tl.load(out_ptr + N + row)
        for v in range(0, width, BLOCK):
            offs_v = v + tl.arange(0, BLOCK)
            s = tl.load(s_ptr + n * stride_s + offs_v, mask=offs_v < width, other=float("-inf"))
            t = tl.load(t_ptr + n * stride_t + offs_v, mask=offs_v < width, other=float("-inf"))
            log_q = s - max_s - log_sum_s
            log_p = t - max_t - log_sum_t
            log_m = _log_mixture(log_q, log_p, log_rest, log_beta)
            q = tl.exp(log_q)
            p = tl.exp(log_p)
            sum_s += tl.sum(tl.where(q == 0, 0.0, q * (log_q - log_m)), 0)
            sum_t += tl.sum(tl.where(p == 0, 0.0, p * (log_p - log_m)), 0)
        tl.store(out_ptr + row, sum_s)
        tl.store(out_ptr + N + row, sum_t)


def add_mixture_divergences(
    s: torch.Tensor,
    t: torch.Tensor,
    count: torch.Tensor,
    maximum: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
    *,
    row0: int,
    beta: float,
) -> None:
    """Adds the panel's terms of ``KL(q || m)`` and ``KL(p || m)`` to ``out`` [2, N]. ``s`` and ``t`` are scratch."""
    if triton_serves(s):
        if s.numel():
            _mixture_kernel[(len(s),)](
                s, t, count, maximum, log_sum, out, out.shape[1], s.shape[1], row0, s.stride(0), t.stride(0),
                math.log1p(-beta), math.log(beta), BLOCK=BLOCK,
            )  # fmt: skip
        return
    for piece, rows in _pieces(s, count, row0):
        logs = [_log_softmax(x[piece], maximum[h, rows], log_sum[h, rows]) for h, x in enumerate((s, t))]
        mixture = torch.logaddexp(logs[0] + math.log1p(-beta), logs[1] + math.log(beta))
        for h, x in enumerate(logs):
            out[h, rows] += _weighted_sum(x.exp(), x - mixture)


@triton.jit
def _divergence_gradient_kernel(
    s_ptr, t_ptr, out_ptr, count_ptr, max_ptr, log_sum_ptr, center_ptr, grad_ptr, N, width, row0,
    stride_s, stride_t, stride_out, log_rest, log_beta, ceiling,
    KIND: tl.constexpr, HAS_CEILING: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = row0 + n
    offs_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_v < width
    if row >= tl.load(count_ptr):
        # the products read whole tiles of rows
        tl.store(out_ptr + n * stride_out + offs_v, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=mask)
    else:
        s = tl.load(s_ptr + n * stride_s + offs_v, mask=mask, other=0.0)
        log_q = s - tl.load(max_ptr + row) - tl.load(log_sum_ptr + row)
        dx = tl.exp(log_q)
        if KIND != "top_k":
            t = tl.load(t_ptr + n * stride_t + offs_v, mask=mask, other=0.0)
            log_p = t - tl.load(max_ptr + N + row) - tl.load(log_sum_ptr + N + row)
            if KIND == "forward":
                dx -= tl.exp(log_p)
            else:
                if KIND == "jensen_shannon":
                    log_p = _log_mixture(log_q, log_p, log_rest, log_beta)
                dx = tl.where(dx == 0, 0.0, dx * (log_q - log_p - tl.load(center_ptr + row)))
        dx *= tl.load(grad_ptr + row)
        if HAS_CEILING:
            dx *= 1.0 - (s / ceiling) * (s / ceiling)
        if KEEP:
            tl.store(s_ptr + n * stride_s + offs_v, dx, mask=mask)
        tl.store(out_ptr + n * stride_out + offs_v, dx.to(out_ptr.dtype.element_ty), mask=mask)


def divergence_gradient(
    s: torch.Tensor,
    t: torch.Tensor | None,
    out: torch.Tensor,
    count: torch.Tensor,
    maximum: torch.Tensor,
    log_sum: torch.Tensor,
    center: torch.Tensor,
    grad: torch.Tensor,
    *,
    row0: int,
    kind: str,
    beta: float,
    ceiling: float | None,
) -> None:
    """``grad`` times the panel's gradient, into ``s`` in full precision and, rounded once, into ``out``, which may be
    ``s``: ``q - p`` for the kind ``"forward"``, ``q (log(q / p) - center)`` for ``"reverse"``,
    ``q (log(q / m) - center)`` for ``"jensen_shannon"``, ``q`` for ``"top_k"``; each times ``1 - (s / ceiling)^2``,
    a softcap's derivative. Rows of ``out`` at or past ``count`` hold zeros where the kernels write it. ``t`` is
    scratch."""
    if triton_serves(s):
        if s.numel():
            _divergence_gradient_kernel[(len(s), cdiv(s.shape[1], BLOCK))](
                s, t, out, count, maximum, log_sum, center, grad, maximum.shape[1], s.shape[1], row0, s.stride(0),
                0 if t is None else t.stride(0), out.stride(0), math.log1p(-beta), math.log(beta),
                1.0 if ceiling is None else ceiling,
                KIND=kind, HAS_CEILING=ceiling is not None, KEEP=out.data_ptr() != s.data_ptr(), BLOCK=BLOCK,
            )  # fmt: skip
        return
    for piece, rows in _pieces(s, count, row0):
        x = s[piece]
        slope = None if ceiling is None else 1 - (x / ceiling).square()
        log_q = _log_softmax(x, maximum[0, rows], log_sum[0, rows])
        dx = log_q.exp()
        if t is not None:
            log_p = _log_softmax(t[piece], maximum[1, rows], log_sum[1, rows])
            if kind == "forward":
                dx -= log_p.exp_()
            else:
                if kind == "jensen_shannon":
                    log_p = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
                log_q -= log_p
                log_q -= center[rows, None]
                dx = (dx * log_q).masked_fill_(dx == 0, 0)
        dx *= grad[rows, None]
        if slope is not None:
            dx *= slope
        x.copy_(dx)
        if out.data_ptr() != s.data_ptr():
            out[piece] = dx


def _pieces(s: torch.Tensor, count: torch.Tensor, row0: int) -> Iterator[tuple[slice, slice]]:
    """The rows of a panel that the twins take at once, and their places among all rows."""
    n = max(0, min(len(s), int(count) - row0)) if s.shape[1] else 0
    step = max(1, PASS // max(1, s.shape[1]))
    for first in range(0, n, step):
        last = min(first + step, n)
        yield slice(first, last), slice(row0 + first, row0 + last)


def _log_softmax(x: torch.Tensor, maximum: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    # not their sum: it would be rounded to the precision of the larger
    return x.sub_(maximum[:, None]).sub_(log_sum[:, None])


def _weighted_sum(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The sum of ``weight x`` of each row, 0 where the weight is, whatever x is there."""
    return x.mul_(weight).masked_fill_(weight == 0, 0).sum(1)
