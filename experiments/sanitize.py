"""Small cases of every kernel, to run under NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python -m experiments.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m experiments.sanitize

The cases of ``kernels/testing/cases.py`` have hostile block tables, poison in every slot that must
not be read and contexts that end inside a tile. Each runs with and without split-KV and with a
window where the kernel has these, on fp16 and on fp8 caches, and is compared with its reference.
PyTorch's caching allocator is off, so a read past a tensor is a read past an allocation. Without a
GPU the kernels run in the interpreter, which tests the command itself.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence

from experiments.bench.shapes import use_device
from experiments.kernel_accuracy import KERNELS, KernelAccuracy

_DTYPES = {"fp16": "float16", "fp8": "fp8"}


def cases(kernels: Sequence[str], *, cache_dtypes: Sequence[str]) -> Iterator[KernelAccuracy]:
    """The cells of ``kernel_accuracy`` to run."""
    for name, dtype, feature, block_size in itertools.product(
        kernels, cache_dtypes, ("none", "window", "split"), (7, 16)
    ):
        kernel = KERNELS[name]
        if feature in kernel.features and (kernel.touches_cache or dtype != "fp8"):
            yield KernelAccuracy(
                kernel=name,
                dtype=_DTYPES[dtype],
                feature=feature,
                block_size=block_size,
                head_dim=80,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if a result is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sanitize", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--kernel", action="append", choices=KERNELS, metavar="NAME",
        help="only this one, repeatable: " + ", ".join(KERNELS),
    )  # fmt: skip
    parser.add_argument("--cache-dtype", action="append", choices=_DTYPES)
    options = parser.parse_args(arguments)
    # Read when PyTorch first allocates on a GPU.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    device = use_device().type
    wrong = 0
    for case in cases(options.kernel or [*KERNELS], cache_dtypes=options.cache_dtype or [*_DTYPES]):
        cache = "fp8" if case.dtype == "fp8" else "fp16"
        what = f"{case.kernel}, {case.feature}, block {case.block_size}, {cache} cache"
        for result, accuracy in case.check(device).items():
            verdict = "ok" if accuracy.passed else "WRONG"
            wrong += not accuracy.passed
            print(f"{verdict:5}  {what}: {result}: error {accuracy.error:.2g}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
