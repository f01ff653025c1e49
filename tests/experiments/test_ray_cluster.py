"""Sweeps on a real Ray cluster of several nodes on this machine."""

import json
import os
import sys
import tempfile
import threading
from pathlib import Path

import pandas as pd
import pytest

from experiments import cli
from experiments.harness.environment import describe
from experiments.registry import EXPERIMENTS

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("ray"),
]

HERE = Path(__file__).parent


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Two nodes of one core each, whose cells write a journal."""
    from ray.cluster_utils import Cluster

    if " " in ray.__file__ + sys.executable:
        pytest.skip("Ray starts no worker whose command has a path with a space")
    behaviour = {"journal": str(tmp_path / "journal"), "sleep": 1.0}
    monkeypatch.setenv("TINY_BEHAVIOUR", json.dumps(behaviour))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if len(os.fsencode(tempfile.gettempdir())) > 40:  # a socket's path has at most 107 bytes
        monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "60")
    monkeypatch.setattr(Cluster._wait_for_node, "__defaults__", (60,))
    sizes = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster()
    try:
        cluster.add_node(include_dashboard=False, **sizes)
        cluster.second = cluster.add_node(**sizes)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_node_dies_and_no_cell_is_lost_or_doubled(
    tiny, cluster, journal, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "EXPERIMENTS", tiny.EXPERIMENTS)
    data = tmp_path / "data.txt"
    data.write_text("every cell reads this")
    folder = tmp_path / "results" / "tiny" / "cpu"
    run = ["run", "tiny", "--cells", "5", "--file", str(data)]
    ended = threading.Event()

    def kill_a_node() -> None:
        while len(list(folder.glob(".cells/*.json"))) < 2 and not ended.wait(0.05):
            pass
        cluster.remove_node(cluster.second, allow_graceful=False)

    killer = threading.Thread(target=kill_a_node)
    killer.start()
    try:
        assert cli.main([*run, "--ray", cluster.address]) == 0
    finally:
        ended.set()
        killer.join()
    assert "5 cells, 5 run" in capsys.readouterr().out

    rows = pd.read_csv(folder / "rows.csv")
    assert list(rows["number"]) == [n for n in range(5) for _ in "ab"]
    assert set(journal()) == set(range(5))
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["ray"]["machines"] == [{"cpus": 1.0, "gpus": 0}] * 2
    assert environment["commit"] == describe(EXPERIMENTS["eviction"], [])["commit"]

    # Nothing is left to do, here or there.
    assert cli.main(run) == 0
    assert "0 run, 5 finished earlier" in capsys.readouterr().out


def test_no_cluster_at_the_address(capsys):
    assert cli.main(["run", "eviction", "--ray", "127.0.0.1:1"]) == 2
    assert "error: --ray 127.0.0.1:1: no cluster answers" in capsys.readouterr().err


def test_without_ray_the_option_says_what_to_install(monkeypatch):
    from experiments.harness import NoCluster, RayCluster

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NoCluster, match="--ray needs the package ray: pip install ray"):
        RayCluster("auto")
