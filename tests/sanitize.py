"""Calls that run every kernel at ragged shapes, for compute-sanitizer on a GPU:

    compute-sanitizer --tool memcheck --error-exitcode 7 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 7 python tests/sanitize.py --small
    compute-sanitizer --tool initcheck --error-exitcode 7 python tests/sanitize.py --unaligned

with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor has memory of its own. Run it once without: what the
sanitizer then sees is compiled already.
"""

from __future__ import annotations

import argparse

import torch
from inputs import OPTIONS, make_inputs, make_options
from plans import forced_plan

from cce_dist import linear_cross_entropy, linear_kl_div, linear_log_probs

METHODS = ("recompute", "cached", "fused")
# two slabs of exponentials in the classifier's gradient, some in memory of their own, and columns that are not kept
LENT = {"kept": 768, "lent": 512, "slab": 256, "part": 64, "panel": 256, "wide": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one shape in bf16")
    parser.add_argument("--unaligned", action="store_true", help="shapes that no copy engine takes, in bf16")
    args = parser.parse_args()
    shapes = [(1, 1, 1), (129, 65, 257), (200, 72, 1023)]
    shapes = [(65, 72, 257)] if args.small else [(65, 73, 259), (130, 61, 515)] if args.unaligned else shapes
    calls = 0
    for dtype in [torch.bfloat16] if args.small or args.unaligned else [torch.bfloat16, torch.float16, torch.float32]:
        for n, d, v in shapes:
            for without in (None, "softcap", "label_smoothing"):
                for method in METHODS if dtype != torch.float16 else METHODS[:1]:
                    names = [] if without is None else [name for name in OPTIONS if name != without]
                    inputs = make_inputs(n, d, v, dtype, device="cuda", bias=bool(names), ignored=0.3)
                    if without is None and method == "recompute":
                        # of no class: its loss is NaN, and nothing outside is read or written
                        inputs.targets[-1] = v + 5
                    options = make_options(names, inputs, frozen=["token_weight"] if method == "fused" else [])
                    linear_cross_entropy(*inputs[:3], bias=inputs.bias, method=method, **options).backward()
                    calls += 1
            if dtype != torch.float16:
                inputs = make_inputs(n + 80, d + 64, v + 1200, dtype, device="cuda", bias=True, ignored=0.3)
                with forced_plan(**LENT):
                    linear_cross_entropy(*inputs[:3], bias=inputs.bias, method="cached").backward()
                calls += 1
            student = make_inputs(n, d, v, dtype, device="cuda", ignored=0.3)
            log_probs, entropy = linear_log_probs(*student[:3], return_entropy=True)
            (log_probs.sum() + entropy.sum()).backward()
            teacher = make_inputs(n, d, v, dtype, device="cuda", seed=3)
            given = teacher.hidden.detach(), teacher.weight.detach()
            linear_kl_div(*student[:2], *given, divergence="jensen_shannon").backward()
            calls += 2
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
