"""Measures the memory that the model and its largest batch leave for the KV cache."""

import dataclasses
from pathlib import Path

import torch

from cache.serving.sampling_params import SamplingParams
from models.attention import AttentionMetadata
from models.decoder import CausalLM
from models.runner import make_kv_cache
from models.sampler import Sampler

_CGROUP = Path("/sys/fs/cgroup")  # in a container: the control group of this process


def available_host_bytes() -> int:
    """Bytes of memory that are available without swapping, by Linux's estimate, but no more than
    the limit of a container (cgroup v2) leaves."""
    kilobytes = _fields(Path("/proc/meminfo"))["MemAvailable:"]
    available = kilobytes * 1024
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        reclaimable = _fields(_CGROUP / "memory.stat")["inactive_file"]
    except (OSError, ValueError):  # no file, or no limit: "max"
        return available
    return max(0, min(available, limit - used + reclaimable))


def _fields(path: Path) -> dict[str, int]:
    lines = path.read_text().splitlines()
    return {name: int(value) for name, value, *_ in map(str.split, lines)}


@torch.inference_mode()
def profile_peak_bytes(
    model: CausalLM,
    *,
    num_tokens: int,
    num_seqs: int,
    max_model_len: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Run the largest batch; returns the peak of bytes in use on the GPU, by any process.

    The batch has num_tokens tokens, in sequences of max_model_len, and num_seqs rows of logits with
    top-p sampling.  All block tables point to the only block of a KV cache of kv_dtype (None: the
    model's dtype).  CUDA graphs are captured later and do not count.
    """
    device = model.model.embed_tokens.weight.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    lengths = [min(max_model_len, num_tokens - at) for at in range(0, num_tokens, max_model_len)]
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        block_tables=torch.zeros(
            len(lengths), -(-max(lengths) // block_size), dtype=torch.int32, device=device
        ),
        cu_seqlens_q=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
        context_lens=lens,
        max_seqlen_q=max(lengths),
        max_context_len=max(lengths),
    )
    if len(model.groups) > 1:
        metadata = dataclasses.replace(metadata, groups=(metadata,) * len(model.groups))
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    hidden = model(token_ids, positions, make_kv_cache(model, 1, block_size, kv_dtype), metadata)
    logits = model.logits(hidden[torch.zeros(num_seqs, dtype=torch.int64, device=device)])
    sampler = Sampler(device, use_kernels=True)
    sampler(logits, [SamplingParams(top_p=0.5)] * num_seqs, [None] * num_seqs)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    of_other_processes = total - free - torch.cuda.memory_reserved(device)
    return torch.cuda.max_memory_allocated(device) + of_other_processes
