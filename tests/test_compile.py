"""Every kernel compiles for every kind of chip, in the configuration that its launcher would choose there, and fits.

Needs no GPU: the launchers run on CPU tensors with their kernels replaced by recorders, and what they would have
launched goes through Triton's compiler for the chip.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton to compile the kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from cce_dist.kernels import gradient, product, rows, runtime, statistics, target  # noqa: E402

pytestmark = pytest.mark.skipif(runtime.INTERPRETED, reason="the interpreter has replaced the compiler")

KIB = 1024
MODULES = (statistics, gradient, product, rows, target)


class Chip(NamedTuple):
    target: GPUTarget
    shared: int
    tensor_core: str
    tma: bool = False


CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 163 * KIB, r"mma\.sync"),
    "sm_86": Chip(GPUTarget("cuda", 86, 32), 99 * KIB, r"mma\.sync"),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 227 * KIB, r"wgmma\.mma_async", tma=True),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 227 * KIB, r"tcgen05\.mma", tma=True),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 * KIB, r"v_mfma"),
}
SCALARS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.uint8: "u8",
}


class Launch(NamedTuple):
    """What a launcher hands to a kernel."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append(Launch(self.kernel, args, kwargs))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the launchers believe in a chip: ``record(name)`` returns the list that their launches go to."""

    def start(chip: str) -> list[Launch]:
        launches: list[Launch] = []
        for module in MODULES:
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                    monkeypatch.setattr(module, name, _Recorder(value, launches))
            for name, value in (
                ("triton_serves", lambda tensor: True),
                ("target_of", lambda device: chip),
                ("multiprocessors", lambda device: 64),
            ):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        return launches

    return start


def compiled(launch: Launch, chip: Chip) -> Any:
    """The kernel as ``launch`` would compile it: arguments specialised as Triton's launcher specialises them."""
    kernel, options = launch.kernel, dict(launch.kwargs)
    options = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, launch.args, strict=False)) | {k: v for k, v in launch.kwargs.items() if k in names}
    assert values.keys() == set(names), f"{kernel.__name__}: {set(names) - values.keys()} not passed"
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, TensorDescriptor):
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{SCALARS[value.base.dtype]}[{block}]>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{SCALARS[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=chip.target, options=options)


def spilled_bytes(binary: Any, folder: Path) -> int:
    """Bytes of registers that a thread keeps in memory."""
    if "amdgcn" in binary.asm:
        return 4 * sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", binary.asm["amdgcn"]))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    (stack,) = re.findall(r"STACK:(\d+)", report)
    return int(stack)


def launch_products(dtype: torch.dtype, bias: bool, aligned: bool) -> None:
    """Both passes over one panel, with launches as training makes them; every dimension odd where not ``aligned``."""
    n, v, d = (256, 1024, 512) if aligned else (255, 1023, 509)
    e, c = torch.zeros(n, d, dtype=dtype), torch.zeros(v, d, dtype=dtype)
    row, ids, count = torch.zeros(n), torch.zeros(n, dtype=torch.int64), torch.tensor(n)
    b, scale = torch.zeros(v, dtype=dtype) if bias else None, torch.ones(())
    statistics.panel_statistics(e, c, b, ids, count, row, rows=(0, n), col0=4096)
    state = gradient.RowState(ids, row, row, row, row, None)
    panel = torch.zeros(n, 512, dtype=dtype)
    db = torch.zeros(512, dtype=dtype) if bias else None
    gradient.panel_gradient(e, c, b, state, count, scale, panel, v0=512, col0=4096, bias_grad=db)
    if bias:
        # the products know nothing of it
        return
    product.hidden_gradient(panel, c, count, torch.zeros(n, d), v0=512)
    touched = None if dtype == torch.float32 else torch.zeros(512, dtype=torch.uint8)
    product.weight_gradient(panel, e, count, scale, torch.zeros(512, d, dtype=dtype), touched)


def launch_rows(dtype: torch.dtype) -> None:
    """The kernels without a matrix product."""
    n, d = 256, 512
    x, order, count = torch.zeros(n, d, dtype=dtype), torch.arange(n), torch.tensor(n)
    rows.pack_rows(x, order, count)
    rows.unpack_rows(torch.zeros(n, d), order, count, torch.ones(()), dtype)
    ids, row = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    state = gradient.RowState(ids, row, row, row, row, row)
    target.target_rows(x, state, torch.zeros(n, d), col0=4096)
    target.target_classes(x, state, count, torch.ones(()), torch.zeros(1024, d, dtype=dtype), col0=4096)
    tiles = statistics.TileStatistics(torch.zeros(501, n), torch.zeros(501, n))
    tiles.fold_sum(tiles.fold_max(), 45)


# what runs at every change: the chips that most people have, in the dtype that they train in, and one of each other
_FIRST = {("sm_80", "bf16"), ("sm_86", "fp16"), ("sm_90", "bf16"), ("sm_100", "bf16"), ("gfx942", "bf16")}


def _matrix() -> list[Any]:
    cases = []
    for chip in CHIPS:
        for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
            for bias in (False, True):
                for aligned in (True, False):
                    first = aligned and not bias and ((chip, short) in _FIRST or (chip, short) == ("sm_90", "fp32"))
                    name = f"{chip}-{short}{'-bias' if bias else ''}{'' if aligned else '-ragged'}"
                    marks = () if first else pytest.mark.slow
                    cases.append(pytest.param(chip, dtype, bias, aligned, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("chip", "dtype", "bias", "aligned"), _matrix())
def test_product_kernels_fit_the_chip(record, tmp_path, record_property, chip, dtype, bias, aligned) -> None:
    launches, kind = record(chip), CHIPS[chip]
    launch_products(dtype, bias, aligned)
    assert len(launches) == (3 if bias else 4)
    for launch in launches:
        name = launch.kernel.__name__
        binary = compiled(launch, kind)
        code = binary.asm["ptx" if kind.target.backend == "cuda" else "amdgcn"]
        shared, spilled = binary.metadata.shared, spilled_bytes(binary, tmp_path)
        record_property(f"{len(launches)} {name}", f"shared {shared} spilled {spilled}")
        print(f"{chip} {str(dtype)[6:]} {name} shared {shared} spilled {spilled}")
        assert shared <= kind.shared, f"{name} asks for {shared} bytes of shared memory of {kind.shared}"
        # none in training's usual path. a bias and the plain arithmetic units of fp32 cost a few registers around the
        # loop, the addresses of unaligned rows more
        usual = aligned and not bias and dtype != torch.float32
        allowed = 0 if usual else 256 if aligned else 1024
        assert spilled <= allowed, f"{name} spills {spilled} bytes a thread, allowed {allowed}"
        if name == "_fold_bias_kernel":
            continue
        if dtype != torch.float32:
            assert re.search(kind.tensor_core, code), f"{name} does not use the tensor cores"
        if kind.target.backend == "cuda":
            expected = kind.tma and aligned and dtype != torch.float32
            assert ("cp.async.bulk.tensor" in code) == expected, f"{name}: copy engine used {not expected}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("chip", CHIPS)
def test_row_kernels_compile(record, tmp_path, chip, dtype) -> None:
    launches, kind = record(chip), CHIPS[chip]
    launch_rows(dtype)
    assert {launch.kernel.__name__ for launch in launches} == {
        "_pack_rows_kernel", "_unpack_rows_kernel", "_fold_max_kernel", "_fold_sum_kernel",
        "_target_rows_kernel", "_target_classes_kernel",
    }  # fmt: skip
    for launch in launches:
        binary = compiled(launch, kind)
        name = launch.kernel.__name__
        assert binary.metadata.shared <= kind.shared, name
        assert spilled_bytes(binary, tmp_path) == 0, f"{name} spills"


def test_every_kernel_is_compiled(record) -> None:
    launches = record("sm_90")
    launch_products(torch.bfloat16, False, True)
    launch_products(torch.bfloat16, True, True)
    launch_rows(torch.bfloat16)
    defined = {
        value.kernel.__name__ for module in MODULES for value in vars(module).values() if isinstance(value, _Recorder)
    }
    assert {launch.kernel.__name__ for launch in launches} == defined
