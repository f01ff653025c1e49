"""The interpreter that is spared repetition computes what Triton's own does."""

from dataclasses import replace

import pytest
import torch
import triton.language as tl
from attention_ops import OPS
from op_calls import same
from triton.runtime import interpreter

from kernels.fp8_cache import FP8_DTYPE
from kernels.primitives import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED.value, reason="kernels are compiled")


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_same_bits(op, device, monkeypatch):
    call = op.call(device, op.few, kv_dtype=FP8_DTYPE, dtype=torch.bfloat16, window_size=30)
    results = op.run(call, 2)
    hastened = [(interpreter, "_patch_lang"), (interpreter, "_get_np_dtype")]
    for owner, name in [*hastened, (tl.block_type, "__init__"), (tl.tensor, "__init__")]:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    builder = interpreter.interpreter_builder
    checked = replace(builder.options, sanitize_overflow=True)
    monkeypatch.setattr(builder, "options", checked)
    assert same(op.run(call, 2), results)


def test_a_launch_patches_the_language_once_and_restores_it(device, monkeypatch):
    op, scopes = OPS["decode"], []
    call = op.call(device, op.few)
    op.run(call)  # Triton never restores triton.language.core, which the first one patches
    scope = interpreter._LangPatchScope
    monkeypatch.setattr(
        interpreter, "_LangPatchScope", lambda: scopes.append(scope()) or scopes[-1]
    )
    op.run(call)
    assert len(scopes) == 1
    assert tl.core.is_builtin(tl.arange)
    assert tl.core.is_builtin(tl.tensor.__add__)
