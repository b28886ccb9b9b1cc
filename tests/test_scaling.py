"""launch/scaling.py: its model against sums done by hand, its constants against the library, and docs/scaling.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cce_dist import plan
from cce_dist.kernels.config import TILE_V
from cce_dist.planner import token_chunk

ROOT = Path(__file__).resolve().parent.parent
LLAMA, WIDE, DEEPSEEK = (8192, 4096, 128256), (16384, 8192, 128256), (32768, 7168, 129280)


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    monkeypatch.delitem(sys.modules, "scaling", raising=False)
    return importlib.import_module("scaling")


def test_the_document_has_these_tables(scaling, capsys) -> None:
    scaling.main()
    assert capsys.readouterr().out in (ROOT / "docs" / "scaling.md").read_text(), "run launch/scaling.py again"


def test_the_library_does_as_the_model(scaling) -> None:
    assert scaling.TILE == TILE_V
    for tokens, hidden, vocab in scaling.SHAPES:
        assert token_chunk(vocab, TILE_V) == scaling.CHUNK
        for ranks in scaling.SHOWN:
            options = {"tp": ranks, "memory_budget": scaling.BUDGET, "device": "sm_90"}
            # its last panel is as wide as the others
            assert plan(tokens, hidden, vocab, method="recompute", **options).wide == 0


def test_classes_that_hide_a_reduction(scaling) -> None:
    # docs/scaling.md: seconds of a product for each class of a rank, and of the reduction, without its latency
    n, d, ranks = 1e6, 1e3, 8
    reduction = 2 * scaling.moved(4 * n * d, ranks)
    assert reduction / (2 * n * d / scaling.RATE) == pytest.approx(9400, rel=1e-3)


def test_collectives(scaling) -> None:
    # what was measured: 134 MB, 32 KiB and 196 KiB on two GPUs, and the launch
    assert scaling.all_reduce(8192 * 4096 * 4, 2) == pytest.approx(0.53e-3 + 5e-6)
    assert scaling.all_reduce(32 << 10, 2) == pytest.approx(8e-6 + 5e-6, rel=0.02)
    assert scaling.all_reduce(196 << 10, 2) == pytest.approx(9e-6 + 5e-6, rel=0.03)
    # eight: three steps of 4 us up and three down, 7/8 of the bytes twice at 134.2 MB in 0.522 ms
    nvlink = 134217728 / 0.522e-3
    assert scaling.all_reduce(1e9, 8) == pytest.approx(5e-6 + 24e-6 + 2 * 0.875e9 / nvlink)
    # 1024: seven hops up and seven down besides, 127/128 of an eighth of the bytes twice at 50 GB/s
    across = 14 * 15e-6 + 2 * 0.125e9 * 127 / 128 / 50e9
    assert scaling.all_reduce(1e9, 1024) == pytest.approx(5e-6 + 24e-6 + 2 * 0.875e9 / nvlink + across)
    # rings of 7 steps and 1 hop
    ring = 5e-6 + 7 * 4e-6 + 15e-6 + 0.875e9 / nvlink + 0.125e9 / 2 / 50e9
    assert scaling.scatter_or_gather(1e9, 16) == pytest.approx(ring)


def test_steps(scaling) -> None:
    def close(found: float, milliseconds: float) -> None:
        assert found * 1e3 == pytest.approx(milliseconds, rel=2e-3)

    # two ranks: three products of 2 * 8192 * 64128 * 4096 operations, the first rank has 251 tiles of 256 classes,
    # rows pass 14 * 8192 * 4096 bytes; three small collectives, dE's 0.53 ms under one product of 6.25 ms
    fused = scaling.step(LLAMA, 2, "fused")
    close(fused.floor, 3 * 4.30365e12 / 690e9)
    close(fused.tiles, fused.floor * 1e3 * (251 * 256 / 64128 - 1))
    close(fused.rows, 14 * 33554432 / 4e9)
    close(fused.small, 3 * 0.013 + (4 + 24 + 4) * 8192 / 257.1e6)
    assert fused.d_hidden == fused.gathers == 0
    close(fused.total, 18.712 + 0.037 + 0.117 + 0.040)
    # four products, and no references travel
    recompute = scaling.step(LLAMA, 2, "recompute")
    close(recompute.floor, fused.floor * 1e3 * 4 / 3)
    close(recompute.small, 2 * 0.013 + (4 + 24) * 8192 / 257.1e6)
    # slices: E's 67 MB are gathered once, half of them come from the other rank
    slices = scaling.step(LLAMA, 2, "fused", slices=True)
    close(slices.gathers, 0.009 + 33554432 / 257.1e6)
    close(scaling.step(LLAMA, 2, "recompute", slices=True).gathers, 2 * (0.009 + 33554432 / 257.1e6))
    close(slices.total - fused.total, slices.gathers * 1e3)
    # 16 ranks: 59 us, 117 MB twice over NVLink, 8.4 MB twice between hosts, under a product for 32 tiles of classes
    fused = scaling.step(LLAMA, 16, "fused")
    close(fused.d_hidden, 0.059 + 2 * (117440512 / 257.1e6 + 8388608 / 50e6) - 2 * 8192 * 8192 * 4096 / 690e9)
    assert fused.most == "dE"
    # eight ranks: blocks of 14336 tokens hide their parts, one of 4096 is left for a panel of 33 tiles of classes
    recompute = scaling.step(DEEPSEEK, 8, "recompute")
    close(recompute.d_hidden, 0.029 + 2 * 0.875 * 117440512 / 257.1e6 - 2 * 4096 * (33 * 256) * 7168 / 690e9)
    # four chunks' statistics
    close(recompute.small, 4 * (2 * 0.029 + 2 * 0.875 * (4 + 24) * 8192 / 257.1e6))


def test_terms_add_up(scaling) -> None:
    for shape in scaling.SHAPES:
        for method in scaling.METHODS:
            for ranks in scaling.SHOWN:
                found = scaling.step(shape, ranks, method)
                assert found.ratio >= 1
                assert found.total * (1 - found.exposed) == pytest.approx(found.floor + found.tiles + found.rows)
