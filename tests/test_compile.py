"""Every kernel compiles for every kind of chip, in the configuration that its launcher would choose there, and fits.

Needs no GPU: the launchers run on CPU tensors with their kernels replaced by recorders, and what they would have
launched goes through Triton's compiler for the chip.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton to compile the kernels")
sys.path.append(str(Path(__file__).parents[1] / "launch"))

from compiled import MODULES, SHARED, Launch, Recorder, compiled, disassembly, recorded, resources

from cce_dist.kernels import divergence, gradient, logits, panel, product, rows, runtime, statistics, target

pytestmark = pytest.mark.skipif(runtime.INTERPRETED, reason="the interpreter has replaced the compiler")


class Chip(NamedTuple):
    tensor_core: str
    tma: bool = False


CHIPS = {
    "sm_80": Chip(r"mma\.sync"),
    "sm_86": Chip(r"mma\.sync"),
    "sm_90": Chip(r"wgmma\.mma_async", tma=True),
    "sm_100": Chip(r"tcgen05\.mma", tma=True),
    "gfx942": Chip(r"v_mfma"),
}


@pytest.fixture
def record() -> Iterator[Callable[[str], list[Launch]]]:
    """Makes the launchers believe in a chip: ``record(name)`` returns the list that their launches go to."""
    with ExitStack() as stack:
        yield lambda chip: stack.enter_context(recorded(chip))


def waited_products(binary: Any) -> tuple[int, int]:
    """(tensor-core instructions of a kernel for sm_90, those among them that later ones wait for)."""
    products = re.findall(r"HGMMA.*", disassembly(binary, "-sass"))
    return len(products), sum("gsb0" in product for product in products)


# matrices whose rows the copy engine takes; rows it cannot take; and such matrices with a width that the gradient of
# the hidden states cannot be written in by it: a slice of a wider classifier
LAYOUTS = {"aligned": (256, 1024, 512, 512), "ragged": (255, 1023, 509, 509), "sliced": (256, 1024, 510, 512)}


def launch_products(dtype: torch.dtype, bias: bool, layout: str) -> None:
    """The kernels with a matrix product, with launches as training makes them by each method."""
    n, v, d, stride = LAYOUTS[layout]
    e, c = torch.zeros(n, d, dtype=dtype), torch.zeros(v, stride, dtype=dtype)[:, :d]
    row, ids, count = torch.zeros(n), torch.zeros(n, dtype=torch.int64), torch.tensor(n)
    scale, b = torch.ones(()), logits.LogitMap(torch.zeros(v, dtype=dtype) if bias else None)
    width = 512
    panel = torch.zeros(n, width, dtype=dtype)
    slabs = torch.zeros(2, 256, 256, dtype=dtype)[:, :n]
    exponentials = dtype != torch.float16
    # the columns that are kept, in slabs and otherwise, and the others
    kept: dict[str, Any] = {"panels": [slabs, panel[:, :256]], "reference": row} if exponentials else {}
    statistics.panel_statistics(e, c, b, ids, count, row, rows=(0, n), col0=4096, **kept)
    state = gradient.RowState(ids, row, row, row, row, None)
    for db in (torch.zeros(width), None) if bias else (None,):
        gradient.panel_gradient(e, c, b, state, count, panel, v0=512, col0=4096, bias_grad=db)
    if bias:
        # the products know nothing of it
        return
    for add in (False, True):
        product.hidden_gradient(panel, c, count, torch.zeros(n, d), v0=512, add=add)
    out = torch.zeros(width, d, dtype=dtype)
    first, sums = torch.zeros(width, dtype=torch.int32), torch.zeros(n, d)
    in_place, compact = target.ClassSums(first, None), target.ClassSums(first, sums)
    product.weight_gradient(panel, e, count, scale, out, sums=None if dtype == torch.float32 else in_place)
    # a gradient in full precision that is there already
    product.weight_gradient(panel, e, count, scale, torch.zeros(width, d), grow=True)
    if exponentials:
        for add in (False, True):
            product.hidden_gradient(slabs, c, count, torch.zeros(n, d), v0=0, add=add)
        for kept_panel in (panel, slabs):
            product.weight_gradient(kept_panel, e, count, scale, out, sums=compact)
        low = torch.zeros(width, d, dtype=torch.int16) if dtype == torch.bfloat16 else None
        for add, last in ((False, False), (True, False), (True, True)):
            product.weight_gradient(panel, e, count, scale, out, sums=compact, low=low, add=add, last=last)
        # blocks of tokens that take turns: the first takes the sums that wait in the gradient
        started = None if dtype == torch.float32 else in_place
        for start, add, last in ((started, False, False), (None, True, False), (None, True, True)):
            product.weight_gradient(panel, e, count, scale, out, sums=start, low=low, add=add, last=last)


def launch_options(dtype: torch.dtype) -> None:
    """The same kernels as options change them, each alone and all together."""
    n, v, d, _ = LAYOUTS["aligned"]
    e, c = torch.zeros(n, d, dtype=dtype), torch.zeros(v, d, dtype=dtype)
    row, ids, count, width = torch.zeros(n), torch.zeros(n, dtype=torch.int64), torch.tensor(n), 512
    panel, scale, weights = torch.zeros(n, width, dtype=dtype), torch.ones(()), torch.ones(v)
    plain, capped = logits.LogitMap(), logits.LogitMap(scale=scale, softcap=30.0)
    for maps, wanted in (
        (capped, statistics.NOTHING),
        (plain, statistics.Wanted(weights)),
        (plain, statistics.Wanted(entropy=True)),
        (plain, statistics.Wanted(argmax=True)),
        (capped, statistics.Wanted(weights, True, True)),
    ):
        statistics.panel_statistics(e, c, maps, ids, count, row, rows=(0, n), col0=4096, wanted=wanted)
    if dtype != torch.float16:
        for maps, wanted in ((capped, statistics.NOTHING), (plain, statistics.Wanted(weights))):
            statistics.panel_statistics(
                e,
                c[:width],
                maps,
                ids,
                count,
                row,
                rows=(0, n),
                col0=4096,
                wanted=wanted,
                panels=[panel],
                reference=row,
            )
        product.weight_gradient(panel, e, count, scale, torch.zeros(width, d, dtype=dtype), uniform=(weights, scale))
    for maps, log_factor, uniform in (
        (capped, None, None),
        (plain, row, None),
        (plain, None, row),
        (capped, row, row),
    ):
        state = gradient.RowState(ids, row, row, row, row, None, log_factor, uniform, weights)
        gradient.panel_gradient(e, c, maps, state, count, panel, v0=512, col0=4096, bias_grad=None)


def launch_rows(dtype: torch.dtype) -> None:
    """The kernels without a matrix product."""
    n, v, d = 256, 1024, 512
    x, order, count, scale = torch.zeros(n, d, dtype=dtype), torch.arange(n), torch.tensor(n), torch.ones(())
    rows.take_rows(x, order)
    rows.scale_rows(x, torch.zeros(n), count, x)
    rows.row_dots(torch.zeros(n, d), x, count)
    rows.take_rows(torch.zeros(n, d), order, scale=scale, dtype=dtype)
    ids, row, panel = torch.zeros(n, dtype=torch.int64), torch.zeros(n), torch.zeros(n, v, dtype=dtype)
    c = torch.zeros(v, d, dtype=dtype)
    for bias in (None, torch.zeros(v, dtype=dtype)):
        target.target_logits(x, c, logits.LogitMap(bias), ids, col0=4096)
    target.drop_targets(panel, ids, count, row0=0, col0=4096)
    for factor in (None, row):
        target.target_rows(c, ids, row, torch.zeros(n, d), col0=4096, scale=factor)
    target.target_rows(c, ids, row, torch.zeros(n, d), col0=4096, scale=row, uniform=(row, torch.zeros(d)))
    target.class_sums(x, ids, row, count, v, col0=4096)
    # the gradient of a bias
    target.class_sums(torch.ones(n, 1, dtype=dtype), ids, row, count, v, col0=4096)
    target.class_sums(x, ids, row, count, v, col0=4096, out=c, scale=scale)
    target.class_sums(x, ids, row, count, v, col0=4096, out=torch.zeros(v, d), scale=scale, add=True)
    for kept in (panel, torch.zeros(4, n, 256, dtype=dtype)):
        gradient.column_sums(kept, row, count, torch.zeros(v))
    each = torch.zeros(501, n)
    for extra in ((), (each, each, each.int())):
        tiles = statistics.TileStatistics(each, each, ids, row, 4096, v, False, *extra)
        maxima = tiles.maxima()
        tiles.rows(maxima, *tiles.shares(maxima, 45), 45)


def launch_divergence(dtype: torch.dtype) -> None:
    """The kernels of two heads that are compared."""
    e, c, b = torch.zeros(256, 512, dtype=dtype), torch.zeros(1024, 512, dtype=dtype), torch.zeros(1024, dtype=dtype)
    count, row, rows = torch.tensor(200), torch.zeros(256), torch.zeros(2, 256)
    s, t, out = torch.zeros(256, 576)[:, :512], torch.zeros(256, 576)[:, :512], torch.zeros(256, 512, dtype=dtype)
    panel.panel_logits(e, c, logits.LogitMap(b, softcap=5.0), count, s, row0=0, v0=512)
    for expect in (0, 1, None):
        divergence.add_statistics(s, t, count, rows, rows, row, row0=0, expect=expect)
    divergence.add_statistics(s, None, count, rows[:1], rows[:1], row, row0=0, expect=None)
    divergence.add_mixture_divergences(s, t, count, rows, rows, rows, row0=0, beta=0.5)
    for kind in ("forward", "reverse", "jensen_shannon", "top_k"):
        other = None if kind == "top_k" else t
        divergence.divergence_gradient(
            s, other, out, count, rows, rows, row, row, row0=0, kind=kind, beta=0.5, ceiling=4.0
        )


def variant(launch: Launch) -> str:
    """The kernel's name and its switches that are on."""
    switches = [name for name, value in launch.kwargs.items() if value is True]
    return " ".join([launch.kernel.__name__.strip("_").removesuffix("_kernel"), *switches])


# what runs at every change: the chips that most people have, in the dtype that they train in, and one of each other
_FIRST = {("sm_80", "bf16"), ("sm_86", "fp16"), ("sm_90", "bf16"), ("sm_100", "bf16"), ("gfx942", "bf16")}


def _matrix() -> list[Any]:
    cases = []
    for chip in CHIPS:
        for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
            for bias in (False, True):
                for layout in LAYOUTS:
                    if layout == "sliced" and (bias or dtype == torch.float32 or not CHIPS[chip].tma):
                        # only where the copy engine is used, and the gradient of the hidden states made
                        continue
                    first = layout == "aligned" and not bias
                    first &= (chip, short) in _FIRST or (chip, short) == ("sm_90", "fp32")
                    name = f"{chip}-{short}{'-bias' if bias else ''}{'' if layout == 'aligned' else f'-{layout}'}"
                    marks = () if first else pytest.mark.slow
                    cases.append(pytest.param(chip, dtype, bias, layout, id=name, marks=marks))
    return cases


def allowed_spill(chip: str, dtype: torch.dtype, bias: bool, layout: str) -> int:
    """Bytes a thread. The wide tile of sm_90 takes all registers there are: seen up to 24 in the epilogues that keep
    something, which pass once a tile. Pointers to single elements, where nothing is aligned, take more of them."""
    if layout != "aligned":
        return 1024
    if bias or dtype == torch.float32:
        return 256
    return 24 if chip == "sm_90" else 0


@pytest.mark.parametrize(("chip", "dtype", "bias", "layout"), _matrix())
def test_product_kernels_fit_the_chip(record, record_property, chip, dtype, bias, layout) -> None:
    launches = record(chip)
    launch_products(dtype, bias, layout)
    statistics = 1 if dtype == torch.float16 else 3
    assert len(launches) == (statistics + 3 if bias else {torch.float16: 6}.get(dtype, 18))
    assert_fit(launches, record_property, chip, dtype, layout, allowed_spill(chip, dtype, bias, layout))


# what most people have; the others are compiled with --slow
FIRST_CHIP = [chip if chip == "sm_90" else pytest.param(chip, marks=pytest.mark.slow) for chip in CHIPS]
FIRST_DTYPE = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", FIRST_DTYPE, ids=["bf16", "fp32"])
@pytest.mark.parametrize("chip", FIRST_CHIP)
def test_options_fit_the_chip(record, record_property, chip, dtype) -> None:
    launches = record(chip)
    launch_options(dtype)
    assert len(launches) == 12
    # once a tile: up to 192 were seen with one option, 456 with all
    assert_fit(launches, record_property, chip, dtype, "aligned", 512)


def assert_fit(launches, record_property, chip, dtype, layout, allowed) -> None:
    kind, wrong = CHIPS[chip], []
    for launch in launches:
        name = variant(launch)
        binary = compiled(launch, chip)
        code = binary.asm["ptx" if chip.startswith("sm_") else "amdgcn"]
        shared, spilled = binary.metadata.shared, resources(binary).spilled
        record_property(name, f"shared {shared} spilled {spilled}")
        print(f"{chip} {str(dtype)[6:]} {layout} {name}: shared {shared} spilled {spilled}")
        assert shared <= SHARED[chip] * 1024, f"{name} asks for {shared} bytes of shared memory of {SHARED[chip]} KiB"
        if spilled > allowed:
            wrong.append(f"{name} spills {spilled} bytes a thread, allowed {allowed}")
        if name == "fold_bias":
            continue
        if dtype != torch.float32:
            assert re.search(kind.tensor_core, code), f"{name} does not use the tensor cores"
        if chip.startswith("sm_"):
            expected = kind.tma and launch.kwargs["TMA"] and dtype != torch.float32
            assert ("cp.async.bulk.tensor" in code) == expected, f"{name}: copy engine used {not expected}"
        if chip == "sm_90" and dtype != torch.float32:
            # one wait a product. ptxas waits after each instruction where it does not see who reads the accumulator,
            # for one in a nested branch: that took a quarter of the speed, and nothing else showed it
            instructions, waits = waited_products(binary)
            assert (instructions, waits) == (4, 1), f"{name}: {waits} of {instructions} products are waited for"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("chip", CHIPS)
def test_row_kernels_compile(record, chip, dtype) -> None:
    launches = record(chip)
    launch_rows(dtype)
    assert [launch.kernel.__name__[1:-7] for launch in launches] == [
        "take_rows", "scale_rows", "row_dots", "take_rows", "target_logits", "target_logits", "drop_targets",
        "target_rows", "target_rows", "target_rows",
        "class_sums", "class_sums", "class_sums", "class_sums", "column_sums", "column_sums",
        "fold_max", "shares", "losses", "fold_max", "shares", "losses",
    ]  # fmt: skip
    for launch in launches:
        binary = compiled(launch, chip)
        assert binary.metadata.shared <= SHARED[chip] * 1024, variant(launch)
        spilled = resources(binary).spilled
        print(chip, dtype, variant(launch), spilled)
        assert spilled == 0, f"{variant(launch)} spills {spilled} bytes a thread"


@pytest.mark.parametrize("dtype", FIRST_DTYPE, ids=["bf16", "fp32"])
@pytest.mark.parametrize("chip", FIRST_CHIP)
def test_divergence_kernels_compile(record, chip, dtype) -> None:
    launches = record(chip)
    launch_divergence(dtype)
    assert len(launches) == 10
    for launch in launches:
        binary = compiled(launch, chip)
        assert binary.metadata.shared <= SHARED[chip] * 1024, variant(launch)
        spilled = resources(binary).spilled
        print(chip, dtype, variant(launch), spilled)
        # of a product whose epilogue has a bias and a softcap, once a tile
        assert spilled <= (24 if launch is launches[0] else 0), f"{variant(launch)} spills {spilled} bytes a thread"


def test_every_kernel_is_compiled(record) -> None:
    launches = record("sm_90")
    launch_products(torch.bfloat16, False, "aligned")
    launch_products(torch.bfloat16, True, "aligned")
    launch_rows(torch.bfloat16)
    launch_divergence(torch.bfloat16)
    defined = {
        value.kernel.__name__ for module in MODULES for value in vars(module).values() if isinstance(value, Recorder)
    }
    assert {launch.kernel.__name__ for launch in launches} == defined
