"""``pagelab check`` on copies of kernels with planted bugs."""

import re

import pytest

from experiments import check, cli
from experiments.check import check_kernel
from experiments.harness.environment import REPOSITORY

UNMASKED = {"v = load_rows(v_ptrs, token_mask,": "v = load_rows(v_ptrs, offs_n >= 0,"}
LOST_AND_NARROW = {  # a token of every chunk after the third, and a token of every window
    "begin = first + chunk * chunk_tokens\n": "begin = first + chunk * chunk_tokens\n"
    "        begin += (begin * 0 + chunk > 2).to(tl.int32)\n",
    "tl.maximum(context_len - window_size, 0)": "tl.maximum(context_len - window_size + 1, 0)",
}
DECODE = "paged_decode_attention"
WIDTH = {"block_tables.stride(0)": "block_tables.shape[1]"}
STRIDE = {"offsets * stride_v_slot": "offsets * stride_k_slot"}
EVERY = (1, 2, 3, 7, 64)


@pytest.fixture
def planted(tmp_path):
    """Copies the file of an op, with some of its text replaced."""

    def copy(op, edits):
        text = (REPOSITORY / f"kernels/{op}.py").read_text()
        for old, new in edits.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        file = tmp_path / "my_copy.py"
        file.write_text(text)
        return file

    return copy


@pytest.mark.parametrize(
    ("op", "edits", "features", "splits", "wrong", "wrong_splits"),
    [
        (DECODE, UNMASKED, (), EVERY, ["none", "window", "softcap", "alibi", "sinks"], EVERY),
        (DECODE, LOST_AND_NARROW, ("none", "window", "split"), (3, 7, 64), ["window"], (7, 64)),
        (DECODE, WIDTH, ("none", "split"), (1, 2), ["none"], (2,)),
        ("store_kvcache", STRIDE, (), (), ["none"], ()),
    ],
    ids=["values of unused slots", "lost token, narrow window", "table width", "stride of K"],
)
def test_planted_bugs_are_found(
    planted, capsys, monkeypatch, op, edits, features, splits, wrong, wrong_splits
):
    """In the cases of some features and splits: a process that dies costs an import."""
    monkeypatch.setattr(check, "_FEATURES", features)
    monkeypatch.setattr(check, "_SPLITS", splits)
    assert not check_kernel(planted(op, edits), dtypes=["float16"], block_sizes=[256])
    line = "^(?:WRONG|FAILED) (.*), float16, block size 256, layout .*: (?:out|v_cache|its worker)"
    found = re.findall(line, capsys.readouterr().out, re.M)
    assert found == [*wrong, *(f"splits {number}" for number in wrong_splits)]


def test_a_crash_is_a_line_and_the_run_goes_on(planted, capsys):
    crash = "    if out_a.itemsize == 4:\n        import os\n        os._exit(3)\n"
    start = "    num_tokens, num_heads, head_dim = out_a.shape\n"
    file = planted("merge_attention_states", {start: crash + start})
    assert cli.main(["check", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED none, float32: its worker process died" in lines
    assert "\033" not in "".join(lines)
    assert lines[-1] == "merge_attention_states: 4 results, 1 of 3 cases FAILED"


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("missing.py", None, "there is no such file"),
        ("", None, "is a folder"),
        ("broken.py", "def f(:", "is not Python: invalid syntax"),
        ("bytes.py", "\0", "is not Python: .*null bytes"),
        ("none.py", "x = 1", "defines no op; needs one of .*store_kvcache"),
        ("two.py", "def copy_blocks(): 0\ndef swap_blocks(): 0", "defines copy_blocks, swap_bl"),
        ("raises.py", "def copy_blocks(): 0\n1 / 0", "importing it failed: ZeroDivisionError"),
        ("exits.py", "def copy_blocks(): 0\nexit(3)", "importing it failed: .*SystemExit: 3"),
        ("dies.py", "def copy_blocks(): 0\nimport os; os._exit(0)", "failed: its worker process d"),
    ],
)
def test_any_other_file_is_refused(tmp_path, capsys, file, text, says):
    if text is not None:
        (tmp_path / file).write_text(text)
    assert cli.main(["check", str(tmp_path / file)]) == 2
    error = capsys.readouterr().err
    assert re.search(f"^error: {re.escape(str(tmp_path / file))}: .*{says}", error)
    assert error.count("\n") == 1
