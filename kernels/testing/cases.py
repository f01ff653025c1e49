"""One case per op: its inputs, reference results, and minimum bytes and operations.

Experiments and tests that run an op on random inputs take them from here. To add an op, write a
function with its name after an underscore and enter it in `_MAKERS`.

    case = make_case("paged_decode_attention", context_lens=(75, 33), features=("window",))
    case.judge()            # accuracy of every result against fp64, by name

Inputs are hostile: see `kernels.testing.inputs`. On the meta device they have shapes and no values,
which is enough to compile the launches of a call.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import kernels
from kernels import reference
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import Accuracy, accuracy
from kernels.testing.inputs import (
    PagedBatch,
    RandomTensors,
    hidden_tokens,
    make_cache,
    poison_,
    random_paged_batch,
    random_scales,
    random_shared_prefix_args,
)
from kernels.tiles import padded_dim

ATTENTION_FEATURES = ("window", "softcap", "alibi", "sinks", "split")
FEATURES = {
    "rope_store_kvcache": ("interleaved", "norms"),
    "apply_rotary_embedding": ("interleaved",),
    "add_rms_norm": ("alone", "offset"),
    "gated_activation": ("gelu",),
    "sample_tokens": ("greedy", "min_p", "top_k", "top_p"),
    "copy_blocks": ("list",),
    "swap_blocks": ("in", "hnd"),
    "paged_decode_attention": ATTENTION_FEATURES,
    "paged_mla_decode_attention": ("split",),
    "paged_prefill_attention": ATTENTION_FEATURES,
    "shared_prefix_decode_attention": ATTENTION_FEATURES,
}
"""Options of the ops that have any. alone: without a residual. list: caches as a list of layers.
in: from host to device. hnd: into a cache with heads outside slots."""


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
    """Some of `FEATURES` of the op."""
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


def make_case(op: str, **sizes: Any) -> Case:
    """The case of an op; sizes: fields of `Sizes`."""
    return CASES[op](Sizes(**sizes))


def _store_kvcache(s: Sizes) -> Case:
    random = s.random()
    heads = (s.num_q_heads, s.num_kv_heads, s.num_kv_heads)
    qkv = random.normal(s.num_tokens, sum(heads), s.head_dim, dtype=s.dtype)
    _, key, value = qkv.split(heads, dim=1)
    slots, (k_cache, v_cache) = s.slots_and_caches(random)
    inputs = {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache}
    return Case(
        "store_kvcache",
        inputs | {"slot_mapping": slots} | s.cache_scales,
        num_bytes=2 * key.numel() * key.itemsize + s.num_tokens * (s.token_bytes + 8),
        returns=(),
        writes=("k_cache", "v_cache"),
    )


def _concat_and_cache_mla(s: Sizes) -> Case:
    random = s.random()
    dims = s.latent_dims
    # Projected together, as in DeepSeek's models.
    kv_c, k_pe = random.normal(s.num_tokens, sum(dims), dtype=s.dtype).split(dims, dim=1)
    sizes = replace(s, num_kv_heads=1, head_dim=sum(dims), kv_dtype=None)
    slots, (cache, _) = sizes.slots_and_caches(random)
    return Case(
        "concat_and_cache_mla",
        {"kv_c": kv_c, "k_pe": k_pe, "latent_cache": cache[:, :, 0], "slot_mapping": slots},
        num_bytes=s.num_tokens * (2 * sum(dims) * s.dtype.itemsize + 8),
        returns=(),
        writes=("latent_cache",),
    )


def _rotary_tables(s: Sizes, random: RandomTensors) -> dict[str, torch.Tensor]:
    half = (s.rotary_dim or s.head_dim) // 2
    positions = random.permutation(s.num_positions)[: s.num_tokens]
    if positions.is_meta:
        cos, sin = (random.normal(s.num_positions, half, dtype=torch.float32) for _ in range(2))
    else:
        frequencies = (10_000.0 ** -torch.linspace(0, 1, half)).to(s.device)
        angles = torch.arange(s.num_positions, device=s.device)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
    return {"positions": positions, "cos": cos, "sin": sin}


def _rotary_cost(s: Sizes, num_heads: int) -> tuple[int, int]:
    """Bytes of positions, cosines and sines, and operations on the rows of some heads."""
    dim = s.rotary_dim or s.head_dim
    return s.num_tokens * (4 * dim + 8), 3 * s.num_tokens * num_heads * dim


def _apply_rotary_embedding(s: Sizes) -> Case:
    random = s.random()
    num_heads = s.num_q_heads + 2 * s.num_kv_heads
    x = random.normal(s.num_tokens, num_heads, s.head_dim, dtype=s.dtype)[:, : s.num_q_heads]
    table_bytes, flops = _rotary_cost(s, s.num_q_heads)
    return Case(
        "apply_rotary_embedding",
        {"x": x, **_rotary_tables(s, random), "interleaved": "interleaved" in s.features},
        num_bytes=2 * x.numel() * x.itemsize + table_bytes,
        flops=flops,
    )


def _rope_store_kvcache(s: Sizes) -> Case:
    random = s.random()
    store = _store_kvcache(s)
    heads = (s.num_q_heads, s.num_kv_heads, s.num_kv_heads)
    qkv = random.normal(s.num_tokens, sum(heads), s.head_dim, dtype=s.dtype)
    query, key, value = qkv.split(heads, dim=1)
    num_heads = s.num_q_heads + s.num_kv_heads
    table_bytes, flops = _rotary_cost(s, num_heads)
    norms = {}
    if "norms" in s.features:
        names = ("q_norm_weight", "k_norm_weight")
        norms = {name: random.normal(s.head_dim, dtype=s.dtype) for name in names}
        flops += 4 * s.num_tokens * num_heads * s.head_dim
    inputs = {"query": query, **store.inputs, "key": key, "value": value}
    return Case(
        "rope_store_kvcache",
        inputs | _rotary_tables(s, random) | {"interleaved": "interleaved" in s.features, **norms},
        num_bytes=store.num_bytes + 2 * query.numel() * query.itemsize + table_bytes,
        flops=flops,
        returns=(),
        writes=("k_cache", "v_cache", "query"),
    )


def _add_rms_norm(s: Sizes) -> Case:
    random = s.random()
    width = s.width or s.num_q_heads * s.head_dim
    x, residual = random.normal(s.num_tokens, 2 * width, dtype=s.dtype).chunk(2, dim=1)
    adds = "alone" not in s.features
    weight = random.normal(width, dtype=s.dtype)
    inputs = {"x": x, "residual": residual if adds else None, "weight": weight}
    return Case(
        "add_rms_norm",
        inputs | {"offset": float("offset" in s.features)},
        num_bytes=(2 + 2 * adds) * x.numel() * x.itemsize + weight.nbytes,
        flops=(4 + adds) * x.numel(),
        writes=("residual",) if adds else (),
    )


def _gated_activation(s: Sizes) -> Case:
    width = s.width or 3 * s.num_q_heads * s.head_dim
    gate, up = s.random().normal(s.num_tokens, 2 * width, dtype=s.dtype).chunk(2, dim=1)
    activation = "gelu_pytorch_tanh" if "gelu" in s.features else "silu"
    return Case(
        "gated_activation",
        {"gate": gate, "up": up, "activation": activation},
        num_bytes=3 * gate.numel() * gate.itemsize,
        flops=8 * gate.numel(),
    )


def _merge_attention_states(s: Sizes) -> Case:
    random, inputs = s.random(), dict[str, Any]()
    for part in "ab":
        out = random.normal(s.num_tokens, s.num_q_heads, s.head_dim, dtype=s.dtype)
        lse = random.normal(s.num_tokens, s.num_q_heads, dtype=torch.float32)
        if s.padded:  # no keys
            empty = random.integers(0, 5, *lse.shape) == 0
            lse[empty] = -torch.inf
            out[empty] = poison_(torch.empty_like(out[empty]))
        inputs |= {f"out_{part}": out, f"lse_{part}": lse}
    return Case(
        "merge_attention_states",
        inputs,
        num_bytes=3 * (out.numel() * out.itemsize + lse.nbytes),
        flops=4 * out.numel(),
        returns=("out", "lse"),
    )


def _slot_mapping_from_positions(s: Sizes) -> Case:
    batch = random_paged_batch(s.context_lens, **s.paged)
    positions = torch.tensor([p for n in s.context_lens for p in range(n)], dtype=torch.int64)
    if s.padded:
        positions[::7] = -1
    lens = torch.tensor(s.context_lens, dtype=torch.int64)
    seqs = torch.arange(len(lens)).repeat_interleave(lens)
    inputs = {"positions": positions.to(s.device), "block_tables": batch.block_tables}
    return Case(
        "slot_mapping_from_positions",
        inputs | {"seq_ids": seqs.to(s.device), "block_size": s.block_size},
        num_bytes=24 * len(positions) + _table_bytes(s, s.context_lens),
    )


def _sample_tokens(s: Sizes) -> Case:
    rows, device = s.num_tokens, s.device
    logits = s.random().normal(rows, s.vocab_size, dtype=s.dtype)
    inputs = {"logits": logits}
    if "greedy" not in s.features:
        temperatures = (torch.arange(rows) / 4).to(device)  # the first row is greedy
        inputs |= {"temperatures": temperatures, "noise_seeds": torch.arange(rows).to(device)}
    if "min_p" in s.features:
        inputs["min_ps"] = (torch.arange(rows) % 3 / 10).to(device)
    if "top_k" in s.features:
        inputs["top_ks"] = (torch.arange(rows) % 3 * 20 + 1).to(device)
    if "top_p" in s.features:
        inputs["top_ps"] = (1 - torch.arange(rows) % 3 / 10).to(device)
    beside = sum(x.nbytes for x in inputs.values() if x is not logits)
    num_bytes = logits.nbytes + beside + 8 * rows
    return Case("sample_tokens", inputs, num_bytes=num_bytes, returns=("tokens",))


def _copy_blocks(s: Sizes) -> Case:
    random, num_blocks = s.random(), 2 * s.num_pairs + s.spare_blocks
    caches: Any = s.random_cache(random, s.first_block + num_blocks)
    pairs = random.permutation(num_blocks, s.first_block)[: 2 * s.num_pairs].view(-1, 2)
    if "list" in s.features:
        caches = [tuple(layer) for layer in caches.unbind(1)]
    moved = s.num_pairs * s.num_layers * s.block_size
    return Case(
        "copy_blocks",
        {"caches": caches, "src_to_dst": pairs},
        num_bytes=2 * moved * s.token_bytes,
        returns=(),
        writes=("caches",),
    )


def _swap_blocks(s: Sizes) -> Case:
    random, num_blocks = s.random(), s.num_pairs + s.spare_blocks
    caches = s.random_cache(random, s.first_block + num_blocks)
    on_host = {"device": "cpu", "pin_memory": True} if caches.is_cuda else {"device": s.device}
    order = (0, 1, 2, 4, 3, 5) if "hnd" in s.features else range(6)
    other = torch.zeros([caches.shape[dim] for dim in order], dtype=caches.dtype, **on_host)
    source, target = caches, other.permute(*order)
    if "in" in s.features:
        source, target = target.copy_(caches), torch.zeros_like(caches)
    ids = RandomTensors("cpu", s.seed)
    sides = [ids.permutation(num_blocks, s.first_block)[: s.num_pairs] for _ in range(2)]
    pairs = torch.stack(sides, dim=1)
    moved = s.num_pairs * s.num_layers * s.block_size * s.token_bytes
    return Case(
        "swap_blocks",
        {"src_cache": source, "dst_cache": target, "src_to_dst": pairs.to(s.device)},
        num_bytes=moved,
        returns=(),
        writes=("dst_cache",),
    )


def _table_bytes(s: Sizes, context_lens: Iterable[int]) -> int:
    """Block ids of some sequences."""
    return 4 * sum(-(-length // s.block_size) for length in context_lens)


def _attention(
    s: Sizes, op: str, inputs: dict[str, Any], cached: Sequence[int], pairs: int
) -> Case:
    """cached: lengths in the cache, each read once; pairs: of a query and a key that it sees."""
    q = inputs["q"]
    inputs = inputs | {"return_lse": True} | s.score_options
    return Case(
        op,
        inputs,
        num_bytes=sum(cached) * s.token_bytes
        + _table_bytes(s, cached)
        + 2 * q.numel() * q.itemsize,
        flops=4 * pairs * s.num_q_heads * s.head_dim,
        returns=("out", "lse") if inputs["return_lse"] else ("out",),
    )


def _batch(s: Sizes, query_lens: Sequence[int]) -> PagedBatch:
    """The sequences, with poison in tokens that the window hides from all queries."""
    hidden = hidden_tokens(s.context_lens, query_lens, s.score_options.get("window_size"))
    return random_paged_batch(
        s.context_lens, query_lens=query_lens, hidden_tokens=hidden, **s.paged
    )


def _paged_decode_attention(s: Sizes) -> Case:
    inputs = _batch(s, [1] * len(s.context_lens)).inputs
    op = "paged_decode_attention"
    return _attention(s, op, inputs, s.context_lens, sum(s.context_lens))


def _paged_mla_decode_attention(s: Sizes) -> Case:
    rank, rope_dim = s.latent_dims
    paged = s.paged | {"num_kv_heads": 1, "head_dim": rank + rope_dim, "kv_dtype": None}
    inputs: dict[str, Any] = random_paged_batch(s.context_lens, **paged).inputs
    inputs |= {"latent_cache": inputs.pop("k_cache")[:, :, 0], "head_dim_v": rank}
    del inputs["v_cache"]
    options = {"scale": (rank / 4 + rope_dim) ** -0.5, "return_lse": True}
    options |= ({"num_splits": 3} if "split" in s.features else {}) | s.options
    num_tokens, num_rows = sum(s.context_lens), len(s.context_lens) * s.num_q_heads
    elements = num_tokens * (rank + rope_dim) + num_rows * (2 * rank + rope_dim)
    return Case(
        "paged_mla_decode_attention",
        inputs | options,
        num_bytes=elements * s.dtype.itemsize + _table_bytes(s, s.context_lens),
        flops=2 * num_tokens * s.num_q_heads * (2 * rank + rope_dim),
        returns=("out", "lse") if options["return_lse"] else ("out",),
    )


def _paged_prefill_attention(s: Sizes) -> Case:
    batch = _batch(s, s.query_lens)
    inputs: dict[str, Any] = {**batch.inputs, "cu_seqlens_q": batch.cu_seqlens_q}
    inputs["max_seqlen_q"] = max(s.query_lens, default=0)
    lens = list(zip(s.query_lens, s.context_lens, strict=True))
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in lens)
    return _attention(s, "paged_prefill_attention", inputs, s.context_lens, pairs)


def _shared_prefix_decode_attention(s: Sizes) -> Case:
    sizes = s.group_sizes, s.prefix_lens, s.context_lens
    window_size = s.score_options.get("window_size")
    inputs = random_shared_prefix_args(*sizes, window_size=window_size, **s.paged)
    groups = zip(s.group_sizes, s.prefix_lens, strict=True)
    pairs = sum(s.context_lens) + sum(size * prefix for size, prefix in groups)
    cached = [*s.prefix_lens, *s.context_lens]
    return _attention(s, "shared_prefix_decode_attention", inputs, cached, pairs)


_MAKERS = (
    _store_kvcache, _rope_store_kvcache, _apply_rotary_embedding, _slot_mapping_from_positions,
    _add_rms_norm, _gated_activation, _sample_tokens, _copy_blocks, _swap_blocks,
    _merge_attention_states, _paged_decode_attention, _shared_prefix_decode_attention,
    _paged_prefill_attention, _concat_and_cache_mla, _paged_mla_decode_attention,
)  # fmt: skip
CASES: dict[str, Callable[[Sizes], Case]] = {make.__name__[1:]: make for make in _MAKERS}
"""By op, the function that makes its case."""
