"""The experiment launch_overhead, run by the command line: its kernels are not interpreted."""

from __future__ import annotations

import pandas as pd

import kernels
from experiments import launch_overhead

LAUNCHES = {"decode, 8 splits": 2, "shared prefix": 3, "sample": 2, "sample, greedy": 2}


def test_command_line(command_line, tmp_path):
    command_line("run", "launch_overhead", "--num-samples", "9", "--out", tmp_path)
    (path,) = tmp_path.glob("launch_overhead/*/rows.csv")
    assert path.with_name("launch_overhead.png").stat().st_size > 10_000
    rows = pd.read_csv(path)
    assert set(rows["op"]) == set(kernels.__all__)
    assert (rows["us_per_call_p20"] <= rows["us_per_call"]).all()
    assert (rows["us_per_call"] <= rows["us_per_call_p80"]).all()

    us = rows.pivot(index="config", columns="way", values="us_per_call_p20")
    assert set(us) == set(launch_overhead.WAYS)
    assert (us > 0).all(axis=None)
    launches = rows.groupby("config")["num_launches"].first()
    assert launches.to_dict() == {config: LAUNCHES.get(config, 1) for config in us.index}
    launch = us["call"] - us["checks"]  # which takes Triton microseconds, once per kernel
    assert (launch > 1).all()
    assert launch["shared prefix"] > 1.5 * launch["decode"]
