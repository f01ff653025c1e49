"""The configurations that the kernels are tuned for, as calls of the public ops on meta tensors.

`kernels.compiled.compile` compiles the kernels that these calls would launch. Inputs are the cases
of `kernels.testing.cases` at the sizes that each op declares as shipped. Block size 16 is the
smallest with guaranteed 16-byte accesses. Configurations named fp8 have an fp8 cache, scales per
head, and bf16 queries, keys and values.
"""

from collections.abc import Callable, Iterator
from typing import Any

from kernels.testing.cases import OPS, make_case

_SIZES: dict[str, Any] = {
    "num_q_heads": 32, "num_kv_heads": 8, "num_tokens": 8192, "num_positions": 8192,
    "vocab_size": 128_256, "num_pairs": 64, "num_layers": 32, "table_width": 2048,
    "padded": False, "device": "meta",
}  # fmt: skip


def shipped_calls(op: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The name and the call of each shipped configuration of an op."""
    for config, sizes in OPS[op].shipped.items():
        yield config, make_case(op, **_SIZES | {**sizes}).call
