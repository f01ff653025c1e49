"""Settings of the Hypothesis state machines."""

from __future__ import annotations

import os

from hypothesis import Phase, settings


def machine_settings(max_examples: int, stateful_step_count: int) -> settings:
    """A failure is reported without shrinking, and alone.

    Shrinking a state machine takes minutes.  It would end in the test's time limit, which hides the
    failure.  Run with HYPOTHESIS_PROFILE=thorough to shrink it.
    """
    phases = settings.default.phases
    if os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
        phases = [phase for phase in phases if phase not in (Phase.shrink, Phase.explain)]
    return settings(
        max_examples=max_examples,
        stateful_step_count=stateful_step_count,
        phases=phases,
        report_multiple_bugs=False,
    )
