"""Compile SGLang's, vLLM's and our kernels without a GPU, and write ``kernels.csv`` for the model.

    python -m experiments.kernel_time.compiled decode_attention.py extend_attention.py \\
        triton_unified_attention.py

The files are from ``sglang/srt/layers/attention/triton_ops`` 0.5.14 and ``vllm/v1/attention/ops``
0.24.0. The kernels of the measured rows are compiled with the installed Triton. It must be 3.6, as
in the measurements: on the B200, code of Triton 3.6 takes up to twice as long as code of 3.7.
Without files, only our kernels are compiled. Rows of other kernels are kept.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import gpu_times
from experiments.kernel_time import CARDS, shapes
from experiments.kernel_time.launch import launches, lengths_of
from experiments.kernel_time.model import TABLE, gpu_of


def _others(files: dict[str, Path], row: Any, arch: str) -> Callable[[], object]:
    """A function that calls the kernels of a measured row on meta tensors."""
    import torch

    from experiments.kernel_counters.other_kernels import load_sglang, load_vllm

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ints, floats = (functools.partial(empty, dtype=one) for one in (torch.int32, torch.float32))
    batch, tokens, q_heads, kv_heads = row.batch_size, row.query_tokens, row.q_heads, row.kv_heads
    dim, fp8 = row.head_dim, torch.float8_e4m3fn
    kv_dtype = fp8 if row.kv_dtype == "fp8" else torch.bfloat16
    starts, scale = ints(batch + 1), dim**-0.5
    if row.engine.startswith("sglang"):
        v_dim = 128 if dim == 192 else dim
        slots = empty(batch * row.context_tokens, dtype=torch.int64)
        k = empty(len(slots) + 1, kv_heads, dim, dtype=kv_dtype)
        v = empty(len(slots) + 1, kv_heads, v_dim, dtype=kv_dtype)
        sinks = empty(q_heads) if dim == 64 else None
        if row.phase == "decode":
            split_states = floats(batch, q_heads, 8, v_dim), floats(batch, q_heads, 8)
            return lambda: load_sglang(files["decode_attention"]).decode_attention_fwd(
                empty(batch, q_heads, dim), k, v, empty(batch, q_heads, v_dim), starts, slots,
                *split_states, ints(batch), 8, scale, 1.0, 1.0, sinks=sinks,
            )  # fmt: skip
        new = [empty(batch * tokens, kv_heads, size) for size in (dim, v_dim)]
        module: Any = load_sglang(files["extend_attention"])
        module._is_cuda, module.CUDA_CAPABILITY = True, divmod(int(arch.removeprefix("sm_")), 10)
        return lambda: module.extend_attention_fwd(
            empty(batch * tokens, q_heads, dim), *new, empty(batch * tokens, q_heads, v_dim), k, v,
            starts.long(), starts, slots, None, True, None, tokens, 1.0, 1.0, scale, sinks=sinks,
        )  # fmt: skip
    q, cache = empty(batch * tokens, q_heads, dim), empty(4096, 2, 64, kv_heads, dim, dtype=fp8)
    module, one = load_vllm(files["triton_unified_attention"]), floats(1)
    states, padded = (len(q), q_heads, 16), 1 << (dim - 1).bit_length()
    return lambda: module.unified_attention(
        q=q.to(fp8), k=cache[:, 0], v=cache[:, 1], out=q, cu_seqlens_q=starts,
        max_seqlen_q=tokens, seqused_k=ints(batch), max_seqlen_k=row.context_tokens,
        softmax_scale=scale, causal=True, window_size=(-1, -1),
        block_table=ints(batch, row.context_tokens // 64 + 1), softcap=0,
        q_descale=one, k_descale=one.expand(batch, kv_heads), v_descale=one.expand(batch, kv_heads),
        kv_quant_mode=module.KVQuantMode.FP8_PER_TENSOR,
        seq_threshold_3D=128 // kv_heads, num_par_softmax_segments=16,
        softmax_segm_output=floats(*states, padded), softmax_segm_max=floats(*states),
        softmax_segm_expsum=floats(*states),
    )  # fmt: skip


def _ours(row: Any) -> Callable[[], object]:
    """A call of our op on meta tensors, for a row of ``shapes``."""
    import torch

    from kernels.testing.cases import make_case

    kv_dtype = torch.float8_e4m3fn if row.kv_dtype == "fp8" else torch.bfloat16
    return make_case(
        f"paged_{row.phase}_attention", head_dim=row.head_dim, block_size=row.block_size,
        num_q_heads=row.q_heads, num_kv_heads=row.kv_heads, dtype=torch.bfloat16,
        context_lens=lengths_of(row), query_lens=lengths_of(row), device="meta",
        table_width=-(-max(lengths_of(row)) // row.block_size),
        kv_dtype=kv_dtype, scales="none", padded=False, options={"return_lse": False},
    ).call  # fmt: skip


def main(paths: list[str]) -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels is first imported
    import pandas as pd
    import triton

    from experiments.kernel_time import sass
    from kernels.compiled.architectures import ARCHITECTURES, Architecture
    from kernels.compiled.compile import _cuobjdump, compile_call, read_resources

    small = {"shared_bytes": 100 * 1024, "max_warps": 48, "max_programs": 24}
    archs = {
        **ARCHITECTURES,
        "sm_89": Architecture("sm_89", "cuda", 89, num_multiprocessors=142, **small),
        "sm_120": Architecture("sm_120", "cuda", 120, num_multiprocessors=188, **small),
    }
    files = {path.stem: path for path in map(Path, paths)}
    if files:
        calls = gpu_times.rows("attention", kernel="triton")
        calls = calls[calls["engine"] != "vllm 0.22.0"].sort_values(["q_heads", "batch_size"])
    else:
        calls = pd.concat(map(shapes, CARDS), ignore_index=True)
    archs_of = [gpu_of(gpu).arch for gpu in calls["gpu"]]
    calls = calls.assign(kernel=launches(calls)["kernel"], arch=archs_of)
    known = pd.read_csv(TABLE)
    table = known[known["kernel"].str.startswith("pagelab") == bool(files)].to_dict("records")
    for (arch, kernel), rows in calls.groupby(["arch", "kernel"], sort=True):
        rows = rows[rows["query_tokens"] == rows["query_tokens"].max()]
        row = list(rows.itertuples())[len(rows) // 2]
        launched = _others(files, row, arch) if files else _ours(row)
        kernel_of_call = compile_call(launched, archs[arch])[0]
        used = read_resources(row.phase, kernel, archs[arch], *kernel_of_call)
        about = {"arch": arch, "kernel": kernel}
        about["source"] = f"{row.engine}, Triton {triton.__version__}"
        about |= {"registers": used.registers, "programs": used.programs_per_multiprocessor}
        code = sass.parse(_cuobjdump(kernel_of_call[2].asm["cubin"], "-sass"))
        times = sass.timings(code, -1 if files else 0)
        table.append({**about, "warps": used.num_warps, **times})
    rows = pd.DataFrame(table).fillna(0)  # other kernels have no loop over work items
    rows.sort_values(["kernel", "arch"]).to_csv(TABLE, index=False)


if __name__ == "__main__":
    main(sys.argv[1:])
