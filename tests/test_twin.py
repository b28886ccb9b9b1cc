"""The twins' sizes of work are a matter of speed: a row's statistics have the same bits for all of them."""

from __future__ import annotations

import pytest
import torch

from cce_dist.kernels import config
from cce_dist.kernels.logits import LogitMap
from cce_dist.kernels.product import weight_gradient
from cce_dist.kernels.statistics import panel_statistics
from cce_dist.kernels.target import ClassSums


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def statistics(e, c, ids, count, rows, columns, keep):
    logit = torch.zeros(len(e), dtype=e.dtype)
    panel = e.new_full((rows.stop - rows.start, columns.stop - columns.start), torch.nan) if keep else None
    reference = torch.full((len(e),), 0.5, dtype=e.dtype)
    got = panel_statistics(
        e, c[columns], LogitMap(), ids, torch.tensor(count), logit, rows=(rows.start, rows.stop), col0=columns.start,
        panels=() if panel is None else [panel], reference=reference,
    )  # fmt: skip
    n = max(0, min(rows.stop, count) - rows.start)
    return got.tile_max[:, :n], got.tile_sum[:, :n], logit[rows][:n], None if panel is None else panel[:n]


@pytest.mark.parametrize(("n", "d", "v", "count"), [(48, 40, 700, 37), (528, 33, 1500, 500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_statistics_have_the_same_bits_however_they_are_taken(threads, monkeypatch, n, d, v, count, dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    e, c = (torch.randn(size, d, generator=generator, dtype=dtype) for size in (n, v))
    e[count:] = torch.nan
    ids = torch.randint(v, (n,), generator=generator).sort().values
    torch.set_num_threads(1)
    monkeypatch.setattr(config, "PASS", 1)
    whole = statistics(e, c, ids, count, slice(0, n), slice(0, v), True)
    torch.set_num_threads(threads)
    for elements in (1 << 14, 1 << 20):
        monkeypatch.setattr(config, "PASS", elements)
        for step in (n, 256, 16):
            for start in range(0, n, step)[:3]:
                rows = slice(start, min(start + step, n))
                for first, last in ((0, v), (512, v), (256, 512)):
                    columns = slice(first, last)
                    tiles = slice(first // 256, -(-last // 256))
                    for keep in (False, True):
                        top, total, logit, panel = statistics(e, c, ids, count, rows, columns, keep)
                        live = slice(start, start + top.shape[1])
                        assert torch.equal(top, whole[0][tiles, live])
                        assert torch.equal(total, whole[1][tiles, live])
                        here = (ids[live] >= first) & (ids[live] < last)
                        assert torch.equal(logit[here], whole[2][live][here])
                        assert panel is None or torch.equal(panel, whole[3][live, columns])


@pytest.mark.parametrize("count", [0, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("waiting", [False, True])
def test_the_classifiers_gradient_grows_in_its_own_memory(count, dtype, waiting) -> None:
    generator = torch.Generator().manual_seed(count)
    panel = torch.randn(40, 300, generator=generator).to(dtype)
    e = torch.randn(40, 24, generator=generator).to(dtype)
    first = torch.where(torch.arange(300) % 7 == 0, torch.arange(300) % 40, -1).to(torch.int32)
    wide = torch.promote_types(dtype, torch.float32)
    rows = torch.randn(40, 24, generator=generator).to(dtype).to(wide)
    out = torch.full((300, 24), torch.nan, dtype=dtype)
    added = torch.where(first[:, None] >= 0, rows[first.clamp(min=0).long()], 0)
    if waiting:
        out[first >= 0] = added[first >= 0].to(dtype)
    sums = ClassSums(first, None if waiting else rows)
    low = torch.empty(300, 24, dtype=torch.int16) if dtype == torch.bfloat16 else None
    # rows past the count hold anything
    panel[count:], e[count:] = torch.nan, torch.nan
    one, scale = torch.ones((), dtype=wide), torch.tensor(0.5, dtype=wide)
    for start, stop in ((0, 16), (16, 40)):
        last = stop == 40
        weight_gradient(
            panel[start:stop], e[start:stop], torch.tensor(count), scale if last else one, out, row0=start,
            sums=None if start else sums, low=low, add=start > 0, last=last,
        )  # fmt: skip
    true = (panel[:count].double().T @ e[:count].double() + added.double()) / 2
    torch.testing.assert_close(out.double(), true, rtol=0.01 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)
