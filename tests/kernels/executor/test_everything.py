"""The ordinary kernel tests, and the mutants, on the PTX of each architecture: `-m executor`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.executor, pytest.mark.timeout(6 * 3600)]
FOLDER = Path(__file__).parent
MODULES = (
    "test_apply_rotary_embedding.py",
    "test_copy_blocks.py",
    "test_flash_attn_compat.py",
    "test_fp8_cache.py",
    "test_merge_attention_states.py",
    "test_paged_decode_attention.py",
    "test_paged_prefill_attention.py",
    "test_rope_store_kvcache.py",
    "test_sample_tokens.py",
    "test_shared_prefix_decode_attention.py",
    "test_slot_mapping_from_positions.py",
    "test_store_kvcache.py",
    "test_swap_blocks.py",
    "executor/test_mutants.py",
)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_module(architecture, module, run_without_interpreter):
    tests = str(FOLDER.parent / module)
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "3600"]
    run_without_interpreter("-m", "pytest", tests, "--executor", f"ptx-{architecture}", *options)
