"""All supported instructions. Importing these modules registers them in the table."""

from kernels.executor import (  # noqa: F401
    accesses,
    arithmetic,
    atomics,
    calls,
    conversions,
    logic,
    matrix,
    mbarriers,
    tcgen05,
    warpgroup,
    warps,
)
