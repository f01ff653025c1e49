"""One interface to the attention ops, for tests of their common behaviour."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import kernels
from kernels.testing.cases import make_case
from kernels.testing.op import Case

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
SHAPE |= {"dtype": torch.float16}


def assert_accurate(op: str, inputs: dict[str, Any], call: Callable | None = None):
    """Judge output and LSE by the rule of kernels/testing/accuracy.py and return them.

    call: makes them; the op if None."""
    case = Case(op, inputs | {"return_lse": True}, returns=("out", "lse"))
    results = (call or case.call)()
    for name, result in case.judge(lambda: results).items():
        assert result.passed, f"{name}: {result}, bound {result.bound:.3g}"
    return results


class ScoreRounding(TorchFunctionMode):
    """Bounds how far fp32 scores, whose products are added one by one, move the results of
    references that are called in fp64.

    A score is off by at most one unit roundoff of each product and each partial sum (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.3).
    """

    def __init__(self) -> None:
        super().__init__()
        self.bounds = {"out": 0.0, "lse": 0.0}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is not torch.einsum or result.dtype != torch.float64:
            return result
        equation, a, b = args
        if equation == "qhd,khd->hqk":
            products = torch.einsum("qhd,khd->hqkd", a, b)
            rounded = products.cumsum(-1).abs_().sum(-1) + products.abs_().sum(-1)
            self._errors = rounded * 2.0**-24  # [heads, queries, keys]
        else:
            errors = a * self._errors
            lse = errors.sum(-1)
            spread = (b.transpose(0, 1)[:, None] - result.transpose(0, 1)[:, :, None]).abs_()
            out = torch.einsum("hqk,hqkd->qhd", errors, spread)
            for name, bound in (("out", out), ("lse", lse)):
                self.bounds[name] = max(self.bounds[name], bound.max().item())
        return result


def select(call: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """A call of decode or prefill with these sequences, on the same cache."""
    starts = call.get("cu_seqlens_q", torch.arange(len(call["q"]) + 1)).tolist()
    q = [call["q"][starts[row] : starts[row + 1]] for row in rows]
    chosen = {name: call[name][list(rows)] for name in ("block_tables", "context_lens")}
    if "cu_seqlens_q" in call:
        cu_seqlens_q = torch.tensor([0, *map(len, q)]).cumsum(0).to(call["cu_seqlens_q"])
        chosen |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max(map(len, q))}
    return call | chosen | {"q": torch.cat(q)}


@dataclass(frozen=True)
class AttentionOp:
    """An attention op. `usual`, `few` and `two` (equal): lengths of sequences.

    The first sequence (of shared prefixes: the first prefix) of `usual` has 75 tokens.
    """

    name: str
    op: str
    sizes: Callable[..., dict[str, Any]]
    """Sizes of the case from lengths."""
    usual: tuple
    few: tuple
    two: tuple
    lengths: st.SearchStrategy
    tables: tuple[str, ...] = ("block_tables",)
    lens: tuple[str, ...] = ("context_lens",)

    @property
    def function(self) -> Callable:
        return getattr(kernels, self.op)

    def call(self, device, lengths=None, *, window_size=None, **shape) -> dict[str, Any]:
        """Arguments by name, of an fp8 cache without scales. Tokens outside the window are
        poison."""
        options = {"return_lse": False} | ({"window_size": window_size} if window_size else {})
        sizes = SHAPE | {"scales": "none"} | shape | {"options": options, "device": device}
        sizes |= self.sizes(self.usual if lengths is None else lengths)
        call = make_case(self.op, **sizes).inputs
        del call["return_lse"]
        return call

    def splits(self, number: int | None) -> dict[str, int | None]:
        """Arguments for a number of splits of every part of the keys."""
        both = {"num_prefix_splits": number} if self.name == "shared_prefix" else {}
        return both | {"num_splits": number}

    def run(self, call, num_splits: int | None = 1, **options):
        """Output and LSE."""
        options |= self.splits(num_splits) | {"return_lse": True}
        return self.function(**call | options)

    def assert_matches_reference(self, call, num_splits: int | None = None):
        """Output and LSE, which are returned. num_splits None: that of the call, or the default."""
        splits = {} if num_splits is None else self.splits(num_splits)
        return assert_accurate(self.op, call | splits)


def _prefill(lengths) -> dict[str, Any]:
    context_lens, query_lens = zip(*lengths, strict=True) if lengths else ((), ())
    return {"context_lens": context_lens, "query_lens": query_lens}


def _shared_prefix(lengths) -> dict[str, Any]:
    return dict(zip(("group_sizes", "prefix_lens", "context_lens"), lengths, strict=True))


_queries_of = st.integers(0, 70).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, min(n, 24)) | st.integers(0, min(n, 2)))
)
_group = st.tuples(st.integers(0, 70), st.lists(st.integers(0, 40), max_size=2))
OPS = {
    op.name: op
    for op in (
        AttentionOp(
            "decode",
            "paged_decode_attention",
            lambda lengths: {"context_lens": lengths},
            usual=(75, 0, 33),
            few=(40, 5),
            two=(75, 75),
            lengths=st.lists(st.integers(0, 110), min_size=1, max_size=3),
        ),
        AttentionOp(
            "prefill",
            "paged_prefill_attention",
            _prefill,
            usual=((75, 5), (0, 0), (40, 3)),
            few=((40, 5), (5, 2)),
            two=((75, 5), (75, 5)),
            lengths=st.lists(_queries_of, min_size=1, max_size=3),
        ),
        AttentionOp(
            "shared_prefix",
            "shared_prefix_decode_attention",
            _shared_prefix,
            usual=((2, 1), (75, 0), (3, 40, 0)),
            few=((1, 1), (7, 37), (3, 20)),
            two=((1, 1), (75, 75), (30, 30)),
            lengths=st.lists(_group, min_size=1, max_size=3).map(
                lambda groups: (
                    [len(suffixes) for _, suffixes in groups],
                    [prefix for prefix, _ in groups],
                    [length for _, suffixes in groups for length in suffixes],
                )
            ),
            tables=("prefix_block_tables", "suffix_block_tables"),
            lens=("prefix_lens", "suffix_lens"),
        ),
    )
}
