"""Converters, on excerpts in the publishers' formats."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import load_trace, save_trace
from cache.traces.convert import convert_bailian, convert_ragpulse, convert_sessions, main
from cache.traces.trace import TraceError
from tests.cache.prefix_traces import requests_of


def write(path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def bailian(timestamp, *hash_ids, **more):
    return {
        "chat_id": 159, "parent_chat_id": -1, "timestamp": timestamp,
        "input_length": 16 * len(hash_ids), "output_length": 132, "type": "text", "turn": 1,
        "hash_ids": hash_ids, **more,
    }  # fmt: skip


def test_bailian_hashes_of_single_blocks_are_chained(tmp_path):
    """The same block after another prefix is another one; twice in a prompt, two."""
    records = (bailian(0.0, 7, 7, 9), bailian(61.114, 7, 7, 8), bailian(61.2, 9, 7))
    trace = convert_bailian(write(tmp_path / "qwen_traceB_blksz_16.jsonl", *records))
    assert (trace.name, trace.block_size) == ("qwen_traceB_blksz_16", 16)
    assert requests_of(trace) == [
        (0.0, 48, 132, [0, 1, 2]),
        (61_114.0, 48, 132, [0, 1, 3]),
        (pytest.approx(61_200.0), 32, 132, [4, 5]),
    ]


LENGTHS = {
    "1_sys_prompt.jsonl": ("sys_prompt_id", {8302: 20, 14332: 4}),
    "2_passages.jsonl": ("passage_id", {6123: 16, 7239: 3}),
    "3_history.jsonl": ("history_id", {15200: 1}),
    "4_user_input.jsonl": ("user_input_id", {26923: 9, 26922: 40}),
    "5_web_search.jsonl": ("web_search_id", {20319: 5}),
}


def ragpulse(folder, *records):
    for name, (field, lengths) in LENGTHS.items():
        components = ({field: part, "token_length": length} for part, length in lengths.items())
        write(folder / name, *components)
    write(folder / "0_trace.jsonl", *records)
    return folder


def question(timestamp, passages, user_input, web_search=()):
    parts = {
        "sys_prompt": [8302, 14332], "passages_ids": passages, "history": [15200],
        "web_search": list(web_search), "user_input": [user_input],
    }  # fmt: skip
    lengths = {"input_length": 99, "output_length": 192}
    return {"timestamp": timestamp, **lengths, "hash_ids": parts, "session_id": "1757-a"}


def test_ragpulse_components_are_joined_and_cut(tmp_path):
    folder = ragpulse(
        tmp_path / "data",
        question("82", [6123], 26923),  # 20 + 4 + 16 + 1 + 9 = 50 tokens: 3 full blocks
        question("93", [6123], 26922),  # 81 tokens; the third block begins alike and ends apart
        question("95", [7239, 6123], 26923, [20319]),  # 58 tokens; apart in the second block
    )
    trace = convert_ragpulse(folder)
    assert trace.block_size == 16
    assert requests_of(trace) == [
        (82_000.0, 50, 192, [0, 1, 2]),
        (93_000.0, 81, 192, [0, 1, 3, 4, 5]),
        (95_000.0, 58, 192, [0, 6, 7]),
    ]
    assert convert_ragpulse(folder, block_size=25)[0].block_ids.tolist() == [0, 1]
    main(["ragpulse", str(folder), str(folder / "out.jsonl"), "--block-size", "25"])
    assert load_trace(folder / "out.jsonl")[0].block_ids.tolist() == [0, 1]


def session(*requests, scope="local", block_size=64):
    return {
        "id": "trace_0001", "block_size": block_size, "hash_id_scope": scope,
        "tool_tokens": 12439, "requests": requests,
    }  # fmt: skip


def call(t, *hash_ids, **facts):
    size = {"in": 64 * len(hash_ids) + 3, "out": 86}
    return {"t": t, "type": "n", **size, "hash_ids": hash_ids, **facts}


AGENT = {"t": 10.0, "type": "subagent", "agent_id": "a", "requests": [call(0.5, 1, 9)]}


def test_sessions_are_merged_by_arrival_and_ids_are_their_own(tmp_path):
    write(tmp_path / "trace_0001.json", session(call(0.0, 1, 2), AGENT, call(60.0, 1, 2, 3)))
    write(tmp_path / "trace_0002.json", session(call(0.0, 1, 2)))
    trace = convert_sessions(tmp_path, hours=1, seed=3)
    assert trace.block_size == 64
    times = {tuple(request.block_ids): request.timestamp_ms for request in trace}
    blocks = sorted(times, key=len)
    assert len(blocks) == 4
    assert len({block for ids in blocks for block in ids}) == 4 + 2
    start = min(times[ids] for ids in times if ids[0] == blocks[-1][0])
    assert times[blocks[-1]] == start + 60_000
    assert start + 10_500 in times.values()
    assert max(times.values()) < 3600e3 + 60_000
    assert requests_of(convert_sessions(tmp_path, hours=1, seed=3)) == requests_of(trace)
    assert convert_sessions(tmp_path, hours=1, seed=4)[0].timestamp_ms != trace[0].timestamp_ms


def test_further_facts_of_sessions_are_columns(tmp_path):
    calls = call(0.0, 1, stop="tool_use"), AGENT, call(60.0, 1, 2, think_time=2.5, stop=None)
    write(tmp_path / "trace_0001.json", session(*calls))
    rows = [request.further for request in convert_sessions(tmp_path)]
    facts = {"session": 0.0, "agent": 0.0, "tool_tokens": 12439.0, "stop": "tool_use"}
    assert {name: rows[0][name] for name in facts} == facts
    assert (rows[1]["agent"], rows[1]["stop"]) == (1.0, "")
    assert (rows[2]["think_time"], rows[2]["stop"]) == (2500.0, "")
    assert math.isnan(rows[0]["think_time"])
    assert math.isnan(rows[1]["tool_tokens"])


def test_global_ids_are_shared_by_sessions(tmp_path):
    for name in ("trace_0001.json", "trace_0002.json"):
        write(tmp_path / name, session(call(0.0, 1, 2), scope="global"))
    assert convert_sessions(tmp_path).num_unique_blocks == 2


def test_the_command_coarsens_and_writes_what_load_trace_reads(tmp_path, capsys):
    write(tmp_path / "trace_0001.json", session(call(0.0, *range(17)), call(5.0, *range(9))))
    out = tmp_path / "coarse.jsonl.zst"
    main(["sessions", str(tmp_path), str(out), "--coarsen", "8", "--hours", "0"])
    trace = load_trace(out)
    assert requests_of(trace) == [(0.0, 1091, 86, [0, 1]), (5000.0, 579, 86, [0])]
    assert "requests=2" in capsys.readouterr().out
    main(["trace", str(out), str(tmp_path / "again.jsonl")])
    assert load_trace(tmp_path / "again.jsonl").digest == trace.digest
    (tmp_path / "t.csv").write_text("0.5,1 2\n1.5,1 3\n")
    main(["trace", str(tmp_path / "t.csv"), str(out), "--columns", "time=1,hash_ids=2"])
    assert requests_of(load_trace(out)) == [(0, 2, 0, [0, 1]), (1000, 2, 0, [0, 2])]


BAILIAN, SESSION = (convert_bailian, "a.jsonl"), (convert_sessions, "trace_1.json")
NO_TIME = r":1: timestamp must be a number of seconds, got '5'"


@pytest.mark.parametrize(
    ("convert", "name", "record", "message"),
    [
        (*BAILIAN, {"timestamp": 1.0}, r"a.jsonl:1: missing 'input_length'"),
        (*BAILIAN, [1], r"a.jsonl:1: "),
        (*BAILIAN, bailian("5", 1), "a.jsonl" + NO_TIME),
        (*BAILIAN, bailian(-1, 1), r"a.jsonl:1: timestamp_ms=-1000: needs a finite number of at l"),
        (*SESSION, {"requests": []}, r"trace_1.json:1: missing 'block_size'"),
        (*SESSION, session(), r"folder must hold trace_\*.json with requests, got "),
        (*SESSION, session({**call(0.0, 1), "in": "3"}), r"trace_1.json:1: input_length='3'"),
        (*SESSION, session(call("5", 1)), "trace_1.json" + NO_TIME),
        (*SESSION, session(call(0, 1, 2), call(1, 2)), r"trace_1.json:1: hash_ids: 1 follows the"),
        (convert_sessions, "other.json", {}, r"folder must hold trace_\*.json"),
    ],
)
def test_a_malformed_source_is_reported_with_its_place(tmp_path, convert, name, record, message):
    path = write(tmp_path / name, record)
    with pytest.raises(ValueError, match=message):
        convert(path if convert is convert_bailian else tmp_path)


FIELDS = "timestamp t input_length in output_length hash_ids stop tool_tokens think_time block_size"
ODD = [-1, -0.0, 0.7, 1e306, 10**400, math.nan, None, True, "5", "", [], [7], {}, "\ud800"]


@given(st.dictionaries(st.sampled_from(FIELDS.split()), st.sampled_from(ODD), max_size=3))
def test_a_source_is_an_error_or_a_trace_that_is_read_back(tmp_path_factory, odd):
    folder = ragpulse(tmp_path_factory.getbasetemp() / "odd", question("2", [6123], 26923) | odd)
    write(folder / "trace_1.json", session(call(3, 1, 2) | odd, AGENT) | odd)
    write(folder / "a.jsonl", bailian(1, 7, 7) | odd, bailian(0, 7))
    for convert in (convert_bailian, convert_ragpulse, convert_sessions):
        try:
            trace = convert(folder / "a.jsonl" if convert is convert_bailian else folder)
        except TraceError:
            continue
        save_trace(trace, folder / "out.jsonl")
        assert load_trace(folder / "out.jsonl").digest == trace.digest


def test_a_source_without_requests_fails(tmp_path, capsys):
    empty, out = write(tmp_path / "empty.jsonl"), tmp_path / "out.jsonl"
    with pytest.raises(SystemExit, match="2"):
        main(["bailian", str(empty), str(out)])
    assert "empty.jsonl:1: the file holds no requests" in capsys.readouterr().err
    with pytest.raises(TraceError, match=r"0_trace.jsonl:1: the file holds no requests"):
        convert_ragpulse(ragpulse(tmp_path / "data"))
    assert not out.exists()


def test_an_unknown_component_and_other_blocks_are_reported(tmp_path):
    folder = ragpulse(tmp_path / "data", question("1", [5], 26923))
    with pytest.raises(TraceError, match=r"0_trace.jsonl:1: missing 5"):
        convert_ragpulse(folder)
    for name, block_size in (("trace_1.json", 64), ("trace_2.json", 32)):
        write(tmp_path / name, session(call(0.0, 1), block_size=block_size))
    with pytest.raises(TraceError, match=r"trace_2.json:1: blocks of 32 tokens, others 64"):
        convert_sessions(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["sessions", str(tmp_path), str(tmp_path / "out.jsonl")])
