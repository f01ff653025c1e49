"""experiments.sanitize under ttsem, without a GPU; docs/second-opinion.md tells what it needs.

    python -m docs.second_opinion 90 [OPTION OF experiments.sanitize ...]

The first argument is the compute capability that kernels are compiled for.
"""

from __future__ import annotations

import sys

import numpy as np
from triton.language.extra.cuda.utils import convert_fp8e4b15_to_float16
from ttsem import ops, sanitize


def fp8e4b15_to_float16(codes: np.ndarray) -> list[np.ndarray]:
    """Before sm_89 fp8 caches are read as this format, for which Triton has PTX of its own."""
    codes = np.asarray(codes).astype(np.uint8).astype(np.uint16)
    return [((codes & 0x80) << 8 | (codes & 0x7F) << 7).view(np.float16)]


def main(compute_capability: str, *options: str) -> int:
    """Returns 1 if a result is wrong; ttsem raises where an access or a race is."""
    (ptx,) = (
        constant
        for constant in convert_fp8e4b15_to_float16.__wrapped__.__code__.co_consts
        if "prmt" in str(constant)
    )
    ops.PTX_FRAGMENTS[ops._norm_asm(ptx)] = fp8e4b15_to_float16, None
    with sanitize.session(int(compute_capability), "experiments.sanitize") as session:
        import torch
        from torch.overrides import TorchFunctionMode

        class WithoutPinning(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                kwargs = dict(kwargs or {})
                kwargs.pop("pin_memory", None)
                return function(*args, **kwargs)

        # What ttsem does not pretend of a GPU: tensors that lie there, pinned ones, no graph.
        torch.cuda.is_current_stream_capturing = lambda: False
        torch.Tensor.is_cpu = property(lambda self: False)
        torch.Tensor.get_device = lambda self: 0
        torch.Tensor.is_pinned = lambda self, *_: True
        torch.Tensor.pin_memory = lambda self, *_: self
        with WithoutPinning():
            from experiments.sanitize import main

            wrong = main(options)
    print(f"{session.launches} launches, {session.races_unchecked} not searched for races")
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
