"""``pagelab try``, by its command line."""

import re

import pytest

from experiments import cli
from experiments.load import workloads

_POLICY = """
from cache import PriorityPolicy


class Recent(PriorityPolicy):
    @staticmethod
    def priority(block):
        return block.accessed


class Broken(PriorityPolicy):
    compilable = False

    def priority(self, block):
        raise RuntimeError("no priority today")
"""


@pytest.fixture
def policy_file(tmp_path, monkeypatch):
    monkeypatch.setattr(workloads, "REAL_TRACES", workloads.REAL_TRACES[1:])
    file = tmp_path / "my_policy.py"
    file.write_text(_POLICY)
    return file


def test_a_policy_is_placed_between_lru_and_the_optimum(policy_file, tmp_path, capsys):
    assert cli.main(["try", f"{policy_file}:Recent", "--out", str(tmp_path / "out")]) == 0
    conversation, speed = capsys.readouterr().out.splitlines()[-5:-3]
    assert re.search("^mooncake.*: 17.6% .*LRU 17.6%, optimum 32.4%.; closes 0% ", conversation)
    assert "compiled by numba" in speed
    assert (tmp_path / "out/hit_rate.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("missing.py:Recent", "there is no file missing.py"),
        ("{file}:Recnt", "has no eviction policy class Recnt; it defines Recent, Broken"),
        ("{file}:Broken", "RuntimeError: no priority today"),
    ],
)
def test_a_policy_that_cannot_run_is_named(policy_file, tmp_path, capsys, policy, message):
    policy = policy.format(file=policy_file)
    assert cli.main(["try", policy, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert policy in error
    assert message in error
