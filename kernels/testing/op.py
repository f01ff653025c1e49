"""What an op declares once, for the tests and experiments that run every op.

A file of `kernels/testing/ops` has the `Op` records of a family of ops. Kernel and launcher are in
`kernels/<op>.py`, the reference is in `kernels/reference.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import kernels
from kernels import reference
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import Accuracy, accuracy
from kernels.testing.inputs import RandomTensors, make_cache, random_scales
from kernels.tiles import padded_dim

SizesOf = Mapping[str, Any]
"""Some fields of `Sizes`."""
BadCall = tuple[str, Mapping[str, Any]]
"""(message, arguments that differ from the tiny call); "..." stands for anything."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a case's inputs. An op reads the fields that it needs."""

    context_lens: Sequence[int] = (1, 37, 290)
    """Tokens of each sequence; with shared prefixes, tokens of each suffix."""
    query_lens: Sequence[int] = (1, 37, 20)
    """Queries of each sequence in prefill."""
    prefix_lens: Sequence[int] = (150, 0)
    """Tokens of each group's shared prefix."""
    group_sizes: Sequence[int] = (2, 1)
    """Sequences of each group."""
    num_tokens: int = 13
    """Rows of the ops that work token by token."""
    num_pairs: int = 4
    """Blocks that are copied or swapped."""
    num_layers: int = 2
    num_positions: int = 500
    """Rows of the rotary tables; at least num_tokens, as no position is used twice."""
    rotary_dim: int | None = None
    """Leading elements of a head that are rotated. By default head_dim."""
    vocab_size: int = 2600
    width: int | None = None
    """Row width of add_rms_norm and gated_activation; by default the query heads' together, and
    three times that."""
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    """Dtype of the cache; dtype if None."""
    scales: str = "per head"
    """Kind of an fp8 cache's scales, one of `inputs.SCALES`."""
    layout: str = "NHD"
    first_block: int = 0
    """Blocks before this one are unused."""
    spare_blocks: int = 3
    """Unused blocks among the used blocks."""
    table_width: int | None = None
    """Columns of the block tables. By default two more than the longest sequence needs."""
    exponent: int | None = None
    """Exponent of queries and keys with large exact scores; see `inputs.random_paged_batch`."""
    padded: bool = True
    """Whether some slots and positions are padding (-1, skipped) and some LSEs -inf."""
    features: Sequence[str] = ()
    """Some of the op's features."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the op by name. A window_size counts for the poison of hidden tokens."""
    device: torch.device | str = "cpu"
    seed: int = 0

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def cache_scales(self) -> dict[str, Any]:
        """k_scale and v_scale of an fp8 cache."""
        is_fp8 = self.cache_dtype == FP8_DTYPE
        return random_scales(self.scales, self.num_kv_heads, self.device) if is_fp8 else {}

    @property
    def latent_dims(self) -> tuple[int, int]:
        """kv_lora_rank and qk_rope_head_dim of a latent cache: DeepSeek's 512 and 64 for head_dim
        128, powers of two for all head_dims."""
        head_dim = padded_dim(self.head_dim)
        return min(512, 4 * head_dim), min(64, max(16, head_dim // 2))

    @property
    def block_shape(self) -> tuple[int, int, int]:
        return self.block_size, self.num_kv_heads, self.head_dim

    @property
    def token_bytes(self) -> int:
        """A token's key and value in the cache of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.cache_dtype.itemsize

    @property
    def paged(self) -> dict[str, Any]:
        """Arguments of `random_paged_batch`."""
        names = "num_q_heads num_kv_heads head_dim block_size dtype kv_dtype layout first_block "
        names += "spare_blocks table_width exponent device seed"
        return {name: getattr(self, name) for name in names.split()}

    @property
    def score_options(self) -> dict[str, Any]:
        """Options of an attention op, scales included."""
        heads = torch.arange(1, self.num_q_heads + 1) / self.num_q_heads
        known: dict[str, dict[str, Any]] = {
            "window": {"window_size": 33},
            "softcap": {"softcap": 5.0},
            "alibi": {"alibi_slopes": (2.0 ** (-8 * heads)).to(self.device)},
            "sinks": {"sinks": heads.to(self.device)},
            "split": {"num_splits": 3},
        }
        chosen = {name: x for feature in self.features for name, x in known[feature].items()}
        return chosen | self.cache_scales | self.options

    def random(self) -> RandomTensors:
        return RandomTensors(self.device, self.seed)

    def random_cache(self, random: RandomTensors, num_blocks: int) -> torch.Tensor:
        """K and V of every layer, (2, num_layers, num_blocks, block_size, heads, head_dim)."""
        return random.normal(
            2, self.num_layers, num_blocks, *self.block_shape, dtype=self.cache_dtype
        )

    def slots_and_caches(
        self, random: RandomTensors
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Random slots for num_tokens tokens, every fifth -1 if padded, and caches of zeros."""
        num_blocks = -(-self.num_tokens // self.block_size) + self.spare_blocks
        start = self.first_block * self.block_size
        slots = random.permutation(num_blocks * self.block_size, start)[: self.num_tokens]
        if self.padded:
            slots[::5] = -1
        k_cache, v_cache = make_cache(
            self.first_block + num_blocks, *self.block_shape,
            dtype=self.cache_dtype, device=self.device, layout=self.layout,
        )  # fmt: skip
        return slots, (k_cache.zero_(), v_cache.zero_())

    def rotary_tables(self, random: RandomTensors) -> dict[str, torch.Tensor]:
        """Positions of num_tokens tokens, cosines and sines."""
        half = (self.rotary_dim or self.head_dim) // 2
        positions = random.permutation(self.num_positions)[: self.num_tokens]
        if positions.is_meta:
            shape = self.num_positions, half
            cos, sin = (random.normal(*shape, dtype=torch.float32) for _ in range(2))
        else:
            frequencies = (10_000.0 ** -torch.linspace(0, 1, half)).to(self.device)
            angles = torch.arange(self.num_positions, device=self.device)[:, None] * frequencies
            cos, sin = angles.cos(), angles.sin()
        return {"positions": positions, "cos": cos, "sin": sin}

    def rotary_cost(self, num_heads: int) -> tuple[int, int]:
        """Bytes of positions, cosines and sines, and operations on the rows of some heads."""
        dim = self.rotary_dim or self.head_dim
        return self.num_tokens * (4 * dim + 8), 3 * self.num_tokens * num_heads * dim

    def table_bytes(self, context_lens: Iterable[int]) -> int:
        """Block ids of some sequences."""
        return 4 * sum(-(-length // self.block_size) for length in context_lens)


@dataclass(frozen=True)
class Case:
    """A call of an op, to be made once: it may write to its inputs.

    num_bytes, flops: the minimum that must be moved through the GPU's memory and computed (products
    of attention, weighted sums, rotations, norms and activations): every operand once, windows as
    wide as the context.
    """

    op: str
    inputs: dict[str, Any]
    """Arguments by name."""
    num_bytes: int = 0
    flops: int = 0
    returns: tuple[str, ...] = ("out",)
    """Names of the returned results."""
    writes: tuple[str, ...] = ()
    """Inputs that the op writes to."""

    def call(self, function: Callable | None = None) -> Any:
        """Call the op, or another implementation that has its arguments."""
        return (function or getattr(kernels, self.op))(**self.inputs)

    def judge(self, call: Callable[[], Any] | None = None) -> dict[str, Accuracy]:
        """Accuracy by name of every result of `call`, by the rule of kernels/testing/accuracy.py.

        call: makes the call on `inputs`; `Case.call` if None.
        """
        expected = [self._expected(dtype) for dtype in (None, torch.float64)]
        results = self._named((call or self.call)(), self.inputs)
        if torch.cuda.is_available():  # before the host reads pinned memory
            torch.cuda.synchronize()
        low, ref = expected
        return {name: accuracy(results[name], low[name], ref[name]) for name in ref}

    def _expected(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """The reference's results on copies of the inputs, which become `dtype` if it is given."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            # An fp8 cache stays fp8: references read it in the dtype of the queries.
            keep = not tensor.is_floating_point() or tensor.dtype == FP8_DTYPE
            return tensor.clone() if dtype is None or keep else tensor.to(dtype)

        inputs = tree_map_only(torch.Tensor, copied, self.inputs)
        return self._named(getattr(reference, self.op)(**inputs), inputs)

    def _named(self, result: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        returned = result if isinstance(result, tuple) else (result,)
        written = {name: inputs[name] for name in self.writes}
        if isinstance(caches := written.get("caches"), list):
            written["caches"] = torch.stack([torch.stack(layer) for layer in caches])
        return dict(zip(self.returns, returned, strict=False)) | written


@dataclass(frozen=True)
class Lens:
    """Lists of up to `most` lengths from 0 to `longest`."""

    longest: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op, as tests and experiments need it. Its signature says the rest."""

    case: Callable[[Sizes], Case]
    """Inputs, minimum bytes and operations, names of the results."""
    features: tuple[str, ...] = ()
    """Options that cases may have, tested one at a time."""
    takes_fp8: bool = False
    """Whether the cache may be fp8."""
    has_blocks: bool = True
    """Whether the block size matters."""
    is_exact: bool = False
    """Whether results equal the reference's bit for bit."""

    drawn: Mapping[str, Any] = field(default_factory=dict)
    """Sizes, and arguments by name, that property tests draw: from a sequence, a range or `Lens`.
    In a sequence, a range stands for one of its numbers."""
    scaled: tuple[str, ...] = ()
    """Arguments that property tests multiply."""
    executed: Sequence[SizesOf] = ({},)
    """Sizes of calls on the executor, on each architecture, then changes of these, each on one."""
    repeated: SizesOf = field(default_factory=dict)
    """Sizes of calls that are repeated in search of races. Ops with splits have them."""

    tiny: SizesOf = field(default_factory=dict)
    """Sizes of the valid call from which tests make invalid ones."""
    optional: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that this call leaves out."""
    ranges: Mapping[str, tuple[float | None, float | None]]
    """Least and largest value of every number, and of every element of a tensor in host memory."""
    free_dims: frozenset[tuple[str, int]] = frozenset()
    """(argument, dimension) that no other argument has."""
    bad_calls: Sequence[BadCall] = ()
    bad_values: Sequence[BadCall] = ()
    """Bad calls with values that are checked only in host memory."""

    shipped: Mapping[str, SizesOf]
    """Configurations that tiles are tuned for, by name."""
    guarded: Mapping[str, str] = field(default_factory=dict)
    """By architecture, a pattern of the configurations that `make test` compiles for it."""
    timed: Mapping[str, SizesOf] = field(default_factory=dict)
    """Calls that GPU experiments time, by name."""


HEAD_DIMS = (64, 80, 96, 128, 256)
HALF = (torch.float16, torch.bfloat16)
CACHES = (*HALF, FP8_DTYPE)
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", FP8_DTYPE: "fp8"}


def each(dtypes: Iterable[torch.dtype], variants: Mapping[str, SizesOf]) -> dict[str, SizesOf]:
    """Sizes by name for every variant and dtype: of all tensors, or fp8 of the cache alone, with
    bf16 tensors."""
    found: dict[str, SizesOf] = {}
    for dtype in dtypes:
        of_cache = {"dtype": torch.bfloat16, "kv_dtype": dtype}
        of = of_cache if dtype == FP8_DTYPE else {"dtype": dtype}
        found |= {f"{_NAMES[dtype]} {name}": {**sizes, **of} for name, sizes in variants.items()}
    return found


def by_head_dim(dtypes: Iterable[torch.dtype], features: Sequence[str] = ()) -> dict[str, SizesOf]:
    """Sizes by name for every dtype and head_dim, without features and with each one."""
    variants = {
        f"d{head_dim} {feature}".strip(): {
            "head_dim": head_dim, "features": (feature,) if feature else ()
        }
        for head_dim in HEAD_DIMS
        for feature in ("", *features)
    }  # fmt: skip
    return each(dtypes, variants)
