"""``pagelab try``, by its command line."""

import re

import pandas as pd
import pytest

import cache
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
    line = "^mooncake.*pools of 1, 5, 10 %: 17.6% .*LRU 17.6%, optimum 32.4%.; closes 0% .* of 22$"
    assert re.search(line, conversation)
    assert "compiled by numba" in speed
    assert (tmp_path / "out/hit_rate.png").stat().st_size > 5_000


def test_a_policy_is_tried_on_a_trace_of_ones_own_in_pools_of_ones_own(
    policy_file, tmp_path, capsys, monkeypatch
):
    """LRU and the optimum are replayed in the same pools, also for a policy in Python."""
    file, out = tmp_path / "own.csv", tmp_path / "out"
    file.write_text("".join(f"{t},{b}\n" for t, b in enumerate("abcabdabcabd")))
    rag = cache.make_workload("rag", num_requests=60)
    cache.save_trace(rag, other := tmp_path / "not_csv.jsonl")
    monkeypatch.setattr(workloads, "REAL_TRACES", (other, other))  # of the second, the speed
    policy_file.write_text(_POLICY.replace("priority today", "").replace("raise", "return 0 #"))
    own = ["--trace", str(file), "--columns", "time=1,hash_ids=2", "--capacity-percent", "50", "75"]
    own += ["--trace", str(other)]
    assert cli.main(["try", f"{policy_file}:Broken", *own, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    line = r"^own, mean of pools of 50, 75 %: .*LRU 25.0%, optimum 37.5%\); .* of 2\nnot_csv"
    assert re.search(line, printed)
    summary = pd.read_csv(out / "summary.csv").set_index("policy")["mean_block_hit_rate"]
    assert summary.idxmax() == "belady"
    assert set(summary.index) == {"lru", "belady", "my_policy.py:Broken"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("missing.py:Recent", "missing.py:Recent: policy=.*there is no file missing.py"),
        ("{file}:Recnt", "{file}:Recnt: .* has no eviction policy class Recnt; it defines Recent"),
        ("{file}:Broken", "{file}:Broken: RuntimeError: no priority today"),
        ("lru --trace nope.csv", ".*No such file or directory: 'nope.csv'"),
        ("lru --columns time=ts,hash_ids=b", "--columns: needs --trace FILE.csv, got no --trace"),
        ("lru --trace .", r".*Is a directory: '\.'"),
        ("lru --trace rag --trace rag", "--trace: needs traces of different names, got rag, rag"),
        ("lru --capacity-percent 0", "--capacity-percent 0: needs a number above 0, at most 100"),
    ],
)
def test_a_policy_that_cannot_run_and_a_wrong_option_are_named(
    policy_file, tmp_path, capsys, arguments, message
):
    words = [word.format(file=policy_file) for word in arguments.split()]
    assert cli.main(["try", *words, "--out", str(tmp_path / "out")]) == 2
    message = message.format(file=re.escape(str(policy_file)))
    assert re.match(f"error: {message}", capsys.readouterr().err)
