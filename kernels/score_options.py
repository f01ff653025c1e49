"""The options of an attention op that change its scores, checked once and passed on together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import checks
from kernels.fp8_cache import Scale, scale_arguments


@dataclass(frozen=True)
class ScoreOptions:
    """Arguments of `kernels.paged_decode_attention` with the same names, and `ahead`."""

    scale: float
    window_size: int | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: Scale = None
    v_scale: Scale = None
    ahead: int | None = 0
    """Number of keys after its position that a query sees. None: all."""

    @classmethod
    def checked(
        cls, k_cache: torch.Tensor, scale: float | None, window_size: int | None, softcap: float,
        alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
        k_scale: Scale = None, v_scale: Scale = None, *, ahead: int | None = 0,
    ) -> ScoreOptions:  # fmt: skip
        """Check a call's options, apart from layouts of tensors. scale None: head_dim ** -0.5.

        Raises:
            TypeError, ValueError: an option is no number or not in range, or only fp8 has it.
        """
        checks.check_scales(k_scale, v_scale, k_cache)
        scale = k_cache.shape[-1] ** -0.5 if scale is None else checks.check_number("scale", scale)
        if window_size is not None:
            what = "None (no window) or a number of tokens"
            window_size = checks.check_integer("window_size", window_size, 1, what=what)
        softcap = checks.check_number("softcap", softcap, 0, what="a finite cap (0: off)")
        return cls(scale, window_size, softcap, alibi_slopes, sinks, k_scale, v_scale, ahead)

    def kernel_arguments(self) -> tuple[torch.Tensor | float | None, ...]:
        """Arguments from alibi_slopes_ptr to softcap of the decode and the prefill kernel."""
        scales = *scale_arguments(self.k_scale), *scale_arguments(self.v_scale)
        return self.alibi_slopes, self.sinks, *scales, self.scale, self.softcap

    def kernel_constants(self) -> dict[str, bool]:
        """Constants of these kernels that depend on the scores."""
        return {
            "NEGATIVE_SCALE": self.scale < 0,
            "HAS_SOFTCAP": self.softcap > 0,
            "HAS_ALIBI": self.alibi_slopes is not None,
        }

    @property
    def alibi_stride(self) -> int:
        """Stride of alibi_slopes over sequences: 0 if all sequences have the same slopes."""
        slopes = self.alibi_slopes
        return slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
