"""One small case of every kernel, to be watched by NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python -m experiments.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m experiments.sanitize

The cases are those of ``kernel_checks``: hostile block tables, poison in every slot that must not
be read, contexts that end inside a tile.  Each runs with and without split-KV and with a window
where the kernel has these, on fp16 and on fp8 caches, and is compared with its reference as well.
PyTorch's caching allocator is switched off, so that reading past a tensor is reading past an
allocation.  Without a GPU the kernels run in the interpreter, which tells whether the command
itself works.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.bench.kernel_checks import Case

_BLOCK_SIZES = (7, 16)
_HEAD_DIM = 80
_FEATURES = ("none", "window", "split")


def cases(kernels: Sequence[str], *, cache_dtypes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Kernels by name and the cases to run them on."""
    import torch

    from experiments.bench.kernel_checks import KERNELS, Case
    from experiments.bench.problem import use_device

    device = use_device()
    for name, cache_dtype, feature, block_size in itertools.product(
        kernels, cache_dtypes, _FEATURES, _BLOCK_SIZES
    ):
        kernel = KERNELS[name]
        if feature in kernel.features and (kernel.touches_cache or cache_dtype != "fp8"):
            case = Case(
                block_size=block_size,
                dtype=torch.float16,
                head_dim=_HEAD_DIM,
                feature=feature,
                seed=0,
                device=device,
                fp8_cache=cache_dtype == "fp8",
            )
            yield name, case


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if a result is wrong."""
    from experiments.bench.kernel_checks import KERNELS

    parser = argparse.ArgumentParser(
        prog="python -m experiments.sanitize", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--kernel", action="append", choices=KERNELS, metavar="NAME",
        help="only this one, repeatable: " + ", ".join(KERNELS),
    )  # fmt: skip
    parser.add_argument("--cache-dtype", action="append", choices=("fp16", "fp8"))
    options = parser.parse_args(arguments)
    # Read when PyTorch first allocates on a GPU.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    dtypes = options.cache_dtype or ("fp16", "fp8")
    wrong = 0
    for name, case in cases(options.kernel or list(KERNELS), cache_dtypes=dtypes):
        cache = "fp8" if case.fp8_cache else "fp16"
        what = f"{name}, {case.feature}, block {case.block_size}, {cache} cache"
        for result, accuracy in KERNELS[name].check(case).items():
            verdict = "ok" if accuracy.passed else "WRONG"
            wrong += not accuracy.passed
            print(f"{verdict:5}  {what}: {result}: error {accuracy.error:.2g}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
