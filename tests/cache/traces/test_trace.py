import contextlib
import gzip
import itertools
import json
import math
import os
import pickle
import re
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.traces.convert import convert_bailian
from cache.traces.trace import Trace, TraceError, TraceRequest, load_trace, save_trace
from tests.cache.prefix_traces import requests_of

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:04.0319610,3180,8\r
2023-11-16 18:18:03.9799600,110,27"""


def record(timestamp=0, input_length=1000, output_length=7, hash_ids=(0, 1), **extra):
    lengths = {"input_length": input_length, "output_length": output_length}
    return {"timestamp": timestamp, **lengths, "hash_ids": list(hash_ids), **extra}


def json_lines(*records) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def compressed(data: bytes, suffix: str) -> bytes:
    compress = {"gz": lambda text: gzip.compress(text, 1), "zst": zstandard.compress}
    return compress.get(suffix.rpartition(".")[2], bytes)(data)


def written(folder: Path, data: bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def trace_of(*block_id_lists, timestamps=None, block_size=1) -> Trace:
    timestamps = range(len(block_id_lists)) if timestamps is None else timestamps
    rows = [(t, len(ids), 0, ids) for t, ids in zip(timestamps, block_id_lists, strict=True)]
    return Trace.from_requests(rows, name="t", block_size=block_size)


@pytest.mark.parametrize("has_blanks", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".JSONL"])
def test_reads_mooncake_lines(tmp_path, suffix, has_blanks):
    """Also with a BOM, CRLF, blank lines and no newline at the end."""
    data = json_lines(
        record(0, 1000, 7, [5, 9]),
        record(2.5, 1500, 0, [5, 9, 3], model="m"),
        record(3, 512, 1, [8]),
    )
    if has_blanks:
        data = b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n\r\n   \n\n").rstrip()
    trace = load_trace(written(tmp_path, compressed(data, suffix), "day one" + suffix))
    assert (trace.name, trace.block_size) == ("day one", 512)
    assert requests_of(trace) == [
        (0.0, 1000, 7, [0, 1]), (2.5, 1500, 0, [0, 1, 2]), (3.0, 512, 1, [3])
    ]  # fmt: skip
    assert (len(trace), trace.num_requests) == (3, 3)
    assert (trace.num_block_references, trace.num_unique_blocks) == (6, 4)
    assert trace.has_blocks
    assert trace.offsets.tolist() == [0, 2, 5, 6]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.zst"])
@pytest.mark.parametrize(
    ("columns", "text", "expected"),
    [
        (None, AZURE_2023, [(0, 4808, 10, []), (52.001, 3180, 8, []), (60_000, 110, 27, [])]),
        (
            None, "\ufeffGeneratedTokens,region,TIMESTAMP,ContextTokens\n"
            "5,eu,2024-05-10 00:00:00.009930+00:00,2162\n\n6,us,2024-05-10 02:00:01+02:00,30\n",
            [(0, 2162, 5, []), (990.07, 30, 6, [])],
        ),
        (
            {"time": "ts", "input_length": "prompt", "output_length": "new", "hash_ids": "blocks"},
            ',ts,blocks,prompt,new\n0,5.5,"[7, 9]",32,4\n1,6,"[7, 8]",30,0',
            [(0, 32, 4, [0, 1]), (500, 30, 0, [0, 2])],
        ),
        (
            "timestamp=1, hash_ids = 2", "9,a;b|7\n7.5,a|c|07",
            [(0, 3, 0, [0, 1, 2]), (1.5, 3, 0, [0, 3, 4])],
        ),
        (
            "time=ts,hash_ids=ids", 'ts, ids\n1e-3, "(1, 2)"\n0.002,"{1,2}"\n3e-3,"[1, \'a b\']"',
            [(0, 2, 0, [0, 1]), (1, 2, 0, [0, 1]), (2, 3, 0, [0, 2, 3])],
        ),
    ],
)  # fmt: skip
def test_reads_csv_with_columns_of_azure_or_of_ones_own(tmp_path, suffix, columns, text, expected):
    path = written(tmp_path, compressed(text.encode(), suffix), "t" + suffix)
    trace = load_trace(path, columns=columns)
    assert [(round(time, 9), *rest) for time, *rest in requests_of(trace)] == expected
    assert trace.has_blocks == bool(trace.num_unique_blocks) == bool(expected[0][3])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("", "columns: needs pairs such as time=ts,input_length=prompt, got ''"),
        ("time=ts,", "needs pairs"),
        ("tme=ts,input_length=n", "'tme' is unknown; choose from time, timestamp, input_length, "),
        ("time=ts,time=n", "'time' comes twice"),
        ("time=ts,timestamp=ts,input_length=n", "needs time or timestamp, got time, timestamp, in"),
        ({"time": "ts"}, "needs input_length or hash_ids, got time"),
        (5, "columns: needs pairs such as time=ts,input_length=prompt, got 5"),
        ("time=1,hash_ids=7", "t.csv:1: .* row that has column 1, column 7; missing column 7 in "),
        ("time=1,hash_ids=2", "t.csv:1: column 1 must be a date and time or a number of seconds"),
        ("time=t,hash_ids=n", "t.csv:2: t must be a finite number of at least 0, got '-1e-3'"),
        ("time=n,hash_ids=ids", "t.csv:2: ids must have integers or words as ids, got 'None'"),
        ("time=n,hash_ids=f", r"t.csv:2: f must have integers or words as ids, got 'f\(x'"),
        ("timestamp=ts,input_length=n", r"t.csv:2: ts must be a date and time or a number of mill"),
    ],
)
def test_columns_that_do_not_fit_are_an_error(tmp_path, columns, message):
    path = written(tmp_path, b"ts,n,ids,f,t\nnow,5,[1 None],f(x),-1e-3\n", "t.csv")
    with pytest.raises(ValueError, match=message):
        load_trace(path, columns=columns)
    with pytest.raises(ValueError, match=r"^columns: needs a \.csv file, got .+t\.jsonl"):
        load_trace(path.with_suffix(".jsonl"), columns=columns)


def test_lines_may_span_reads_and_zstandard_frames(tmp_path):
    # Two requests of 300,000 blocks: each line is longer than a read of the stream.
    data = json_lines(record(0, 3, 0, range(300_000)), record(1, 3, 0, range(300_000)))
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"note"
    cuts = [0, 10, 500_000, 1_900_000, len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(cuts)]
    frames = skippable.join(zstandard.compress(piece) for piece in pieces)
    for content, name in ((frames, "t.jsonl.zst"), (data, "t.jsonl")):
        trace = load_trace(written(tmp_path, content, name))
        assert trace.offsets.tolist() == [0, 300_000, 600_000]
        assert trace.num_unique_blocks == 300_000
    members = b"".join(gzip.compress(piece) + bytes(700) for piece in pieces)  # padded
    assert load_trace(written(tmp_path, members, "t.jsonl.gz")).digest == trace.digest


def test_further_numbers_and_texts_of_requests_are_columns(tmp_path):
    """Also if not every request has them; lists are ignored."""
    later, earlier = record(2, session=True, stop="end_turn"), record(1, session=2.5, odd=[3])
    trace = load_trace(written(tmp_path, json_lines(later, earlier), "t.jsonl"))
    assert {name: column.tolist() for name, column in trace.columns.items()} == {
        "session": [2.5, 1.0], "stop": ["", "end_turn"],
    }  # fmt: skip
    assert trace[1:][0].further == trace.coarsened(2)[1].further
    assert trace[1:][0].further == {"session": 1.0, "stop": "end_turn"}
    np.testing.assert_equal(trace.request_facts[:, 4:6], [[np.nan, 1], [0, 1]])
    assert Trace.from_requests(trace, name="v", block_size=trace.block_size).digest == trace.digest
    assert trace_of([0], [1]).digest != trace.digest


def test_integers_that_float64_would_round_are_texts(tmp_path):
    large = [2**60, 2**60 + 1, 2**60 + 1]
    path = written(tmp_path, json_lines(*(record(session=session) for session in large)))
    trace = load_trace(path)
    assert trace.columns["session"].tolist() == [*map(str, large)]
    assert trace.request_facts[:, 5].tolist() == [1, 0, 1]


LINES_NOT_TAKEN = [
    (b'{"timestamp": 0, "input_length": 10, "ou', "malformed JSON"),
    (b"[1, 2]\n", "JSON object"),
    (b"[" * 200_000, "recursion"),
    (b'{"a": "\xff\xfe"}\n', "not UTF-8"),
    (b"\x28\xb5\x2f\xfd\x00\x01", "not UTF-8"),  # compressed, but not named so
    (b'{"timestamp": 0, ' + json_lines(record())[1:], "'timestamp' comes twice"),
    (json_lines(record(n=1)).replace(b'"n": 1', b'"n": 1' + b"0" * 5000), "'n': .* got inf"),
    (record(hash_ids=[1]), r"1 follows the start here and 0 in .*t\.jsonl:1: an id is unique to"),
    *(({k: v for k, v in record().items() if k != name}, f"missing '{name}'")
      for name in record()),
]  # fmt: skip

FIELDS_NOT_TAKEN = [
    ("timestamp", [-1, -5e9, "0", True, None, math.nan, math.inf, 10**400], "_ms=.* of at least 0"),
    ("input_length", [-1, 1.0, True, "3" * 500, None], "input_length=.*: needs an int of at least"),
    ("output_length", [-5, True, "3"], "output_length=.*: needs an int of at least 0"),
    ("input_length", [2**63], "input_length=.*: needs an int of at most 2147483647"),
    ("hash_ids", [3, {"0": 1}, "01", None], "hash_ids must be a list of integers, got"),
    ("hash_ids", [[0, 1.0], [0, True], [0, "a"], [0, [0]]], r"hash_ids\[1\]=.+: needs an int"),
    ("hash_ids", [[4, 7, 4, 7]], "repeat 4"),
    ("n", [math.inf, 10**400, "\ud800"], "'n': needs a finite number or a Unicode text, got "),
    ("block_size", [0, "16", 2**31], "block_size=.*: needs an int of at "),
    ("block_size", [None, 8], "block_size=.*: an earlier request has 9"),
]
LINES_NOT_TAKEN += [
    (record() | {field: value}, reason)
    for field, values, reason in FIELDS_NOT_TAKEN
    for value in values
]

ROWS_NOT_TAKEN = [
    (b"2023-11-16 18:17:03,5", "needs 3 columns, got 2"),
    (b"yesterday,5,6", "TIMESTAMP must be a date and time or a number of seconds, got 'yesterday'"),
    (b"nan,5,6", "TIMESTAMP must be a date and time as in the first row, got 'nan'"),
    (b'2023-11-16 18:17:03,"5,6', "malformed CSV: unexpected end of data"),
    (b"2023-11-16 18:17:03,-5,6", "input_length=-5: needs an int of at least 0"),
    (b"2023-11-16 18:17:03,5.0,6", "ContextTokens must be an integer, got '5.0'"),
    (b"2023-11-16 18:17:03,1_0,6", "ContextTokens must be an integer, got '1_0'"),
    ("2023-11-16 18:17:03,5,٣".encode(), "GeneratedTokens must be an integer, got '٣'"),
]


FILES_NOT_TAKEN = [
    ("t.json", json_lines(record()), "unknown extension '.json'"),
    ("t.jsonl.xz", b"", "unknown extension '.xz'; known: .jsonl, .jsonl.gz, .jsonl.zst, .csv,"),
    ("t.jsonl", b"\n \n", "holds no requests"),
    ("t.jsonl.gz", b"", "holds no requests"),
    ("t.jsonl.gz", gzip.compress(b"", mtime=0), "holds no requests"),
    ("t.jsonl.zst", b"", "holds no requests"),
    ("t.csv", AZURE_2023[:41].encode(), "holds no requests"),
    ("t.csv", b"time,in,out\n", "missing TIMESTAMP"),
    ("t.csv", b"ContextTokens," + AZURE_2023.encode(), "'ContextTokens' comes twice"),
    ("t.csv", AZURE_2023[42:].encode(), "starts with a header"),
    ("t.gz", gzip.compress(b"hello\n", mtime=0), "unknown extension '.gz'"),
    ("t.jsonl.gz", json_lines(record()), "corrupt gzip stream"),
    ("t.jsonl.gz", bytes(700), "corrupt gzip stream"),
    ("t.jsonl.zst", json_lines(record()), "corrupt zstandard stream"),
]
LINES_BEFORE = {"t.jsonl": json_lines(*[record(block_size=9)] * 3), "t.csv": AZURE_2023.encode()}


@pytest.mark.parametrize(
    ("name", "line", "reason", "number"),
    [
        *(("t.jsonl", *row, 5) for row in LINES_NOT_TAKEN),
        *(("t.csv", *row, 5) for row in ROWS_NOT_TAKEN),
        *((*row, 1) for row in FILES_NOT_TAKEN),
    ],
    ids=[row[-1] for row in LINES_NOT_TAKEN + ROWS_NOT_TAKEN + FILES_NOT_TAKEN],
)
def test_what_is_malformed_is_an_error_with_its_place(tmp_path, name, line, reason, number):
    data = json_lines(line) if isinstance(line, dict) else line
    data = LINES_BEFORE[name] + b"\n" + data if number > 1 else data
    path = written(tmp_path, data, name)
    with pytest.raises(TraceError, match=reason) as caught:
        load_trace(path)
    assert (caught.value.path, caught.value.line) == (path, number)
    assert str(caught.value).startswith(f"{path}:{number}: ")
    assert number == 1 or len(caught.value.reason) < 200, "a line must not flood the terminal"


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_stream_cut_short_is_an_error_and_not_a_shorter_trace(tmp_path, compress):
    frames = [compress(json_lines(record(t))) for t in range(2)]
    name = "t.jsonl.gz" if compress is gzip.compress else "t.jsonl.zst"
    assert len(load_trace(written(tmp_path, b"".join(frames), name))) == 2
    for whole, cut in ([b"", frames[0]], frames):
        for end in range(1, len(cut)):
            with pytest.raises(TraceError, match=r"truncated|corrupt"):
                load_trace(written(tmp_path, whole + cut[:end], name))


JSON_VALUES = st.sampled_from(
    ["0", "7", "-1", "1.5", "1e999", "NaN", "-Infinity", "null", "true", "[]", "[[0]]", "[0, 1]",
     "[1, NaN]", "[9223372036854775808]", "{}", '"', '""', '"\\ud800"', '"a\\u0000"', '"\u00e9"',
     "9" * 400, "9" * 5000, "-" + "9" * 5000, "[" + "9" * 5000 + "]", "[" * 20_000, "2147483648"]
)  # fmt: skip
JSON_LINES = st.dictionaries(
    st.sampled_from([*record(), "k", "session", "\\ud800"]), JSON_VALUES, max_size=2
).map(lambda odd: ({key: json.dumps(value) for key, value in record().items()} | odd).items())
JSON_LINES = JSON_LINES.map(lambda row: "{" + ",".join(f'"{k}": {v}' for k, v in row) + "}")
CSV_CELLS = [*AZURE_2023.replace("\n", ",").split(","), "9" * 400, "9" * 5000, "-1", '"1"', ""]
CSV_LINES = st.lists(st.sampled_from(CSV_CELLS), min_size=2, max_size=4).map(",".join)
ODD_BYTES = [*[b""] * 9, b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b" ", b"{", b",", b'"']


@settings(max_examples=150)
@given(
    st.lists(JSON_LINES, max_size=4).map(lambda lines: (".jsonl", lines))
    | st.lists(CSV_LINES, max_size=4).map(lambda rows: (".csv", [AZURE_2023, *rows])),
    st.sampled_from(["", ".gz", ".zst"]),
    st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16"]),
    st.tuples(st.integers(0, 400), st.sampled_from(ODD_BYTES)),
    st.none() | st.integers(0, 300),
    st.sampled_from([load_trace, load_trace, convert_bailian]),
)
def test_any_file_is_a_trace_or_an_error_with_its_place(
    tmp_path_factory, kind_and_lines, compression, encoding, odd, end, load
):
    suffix, (place, odd_bytes) = kind_and_lines[0] + compression, odd
    data = "\n".join(kind_and_lines[1]).encode(encoding)
    data = compressed(data[:place] + odd_bytes + data[place:], suffix)[:end]
    path = written(tmp_path_factory.getbasetemp(), data, "fuzz" + suffix)
    try:
        trace, error = load(path), None
    except TraceError as refused:
        error = refused
    if error:
        assert str(error).encode().startswith(f"{path}:{error.line}: ".encode())
        assert len(error.reason) < 300
        return
    save_trace(trace, again := path.with_name("again.jsonl"))
    assert load_trace(again).digest == trace.digest


VALUES = {
    "timestamp": [0, 7, 0.1, 1 / 3, -0.0, 1e300, 2**63 + 1], "input_length": [1, 0, 5, 2**31 - 1],
    "output_length": [0, 9], "hash_ids": [[0, 1, 2], [], [0, 1, 3], [-1], [0, 1, 3, 2**70, 5]],
    "n": [*[math.nan] * 9, 1, 0.1, -0.0, 2**60 + 1, 1e300, None, True, "\0é"],
    "text": ["", "", None, "1"], "block_size": [None, None, 1],
}  # fmt: skip
VALUES = {name: st.sampled_from(values) for name, values in VALUES.items()}
RECORDS = st.fixed_dictionaries({name: VALUES.pop(name) for name in record()}, optional=VALUES)
ODD = [{field: value} for field, values, _ in FIELDS_NOT_TAKEN for value in values]


@settings(max_examples=4 * settings().max_examples)
@given(
    st.lists(RECORDS, min_size=1, max_size=5),
    st.sampled_from([{}] * len(ODD) + ODD),
    st.sampled_from([None, None, 1, 3]),
    st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst"]),
)
def test_makers_and_readers_have_the_same_rules(tmp_path_factory, records, odd, block_size, suffix):
    records[-1] |= odd
    data = compressed(json_lines(*records), suffix)
    path = written(tmp_path_factory.getbasetemp(), data, "records" + suffix)
    rows = [(*map(each.pop, record()), each) for each in records]
    try:
        made = Trace.from_requests(rows, name="records", block_size=block_size)
    except ValueError as error:
        reason = re.sub(r"requests\[(\d)\]", lambda at: f"{path}:{int(at[1]) + 1}", str(error))
        with pytest.raises(TraceError, match=f"^{re.escape(reason)}$"):
            load_trace(path, block_size=block_size)
        return
    assert load_trace(path, block_size=block_size).digest == made.digest
    for trace in filter(None, (made[1:], made[::2], made.coarsened(2), made)):
        save_trace(trace, str(path))
        first = path.read_bytes()
        save_trace(read := load_trace(path), path)
        assert read.digest == trace.digest
        assert path.read_bytes() == first or [*read.columns] != [*trace.columns]
        assert not suffix.endswith(".gz") or first[4:8] == bytes(4), "no time in the header"


@pytest.mark.parametrize(
    "fields",
    [
        lambda i: {"text": "x" * (300_000 if i == 5 else 20)},
        lambda i: {"input_length": 10**5, "hash_ids": [*range(200 * i, 200 * i + 200)]},
        lambda i: {"agent": i, "session": "a", "think_time": i / 2},
        lambda i: {f"key {i}": i},
    ],
    ids=["text", "ids", "columns", "keys"],
)
def test_memory_is_in_proportion_to_the_file(tmp_path, fields, request):
    path = written(tmp_path, json_lines(*(record(i) | fields(i) for i in range(2000))))
    too_many = pytest.raises(TraceError, match=":257: 'key 256': needs at most 256 fields")
    tracemalloc.start()
    with too_many if "keys" in request.node.name else contextlib.nullcontext():
        save_trace(load_trace(path)[:1500].coarsened(2)[1::2], tmp_path / "part.jsonl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * path.stat().st_size


@pytest.mark.parametrize(("suffix", "byte"), [(".gz", b" "), (".zst", b"\n"), (".zst", b"[")])
def test_a_small_file_that_expands_without_end_is_an_error(tmp_path, suffix, byte):
    path = written(tmp_path, compressed(byte * (3 << 25), suffix), "t.jsonl" + suffix)
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"more than 50,000,000 bytes.*max_decompressed_bytes"):
        load_trace(path, max_decompressed_bytes=50_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * (3 << 25)
    with pytest.raises(TraceError, match="67,108,864 bytes" if byte == b"[" else "no requests"):
        load_trace(path)


def test_a_file_that_cannot_be_opened_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "absent.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for folder in (tmp_path, tmp_path / "folder.jsonl"):
        with pytest.raises(IsADirectoryError, match=folder.name):
            load_trace(folder)


def test_trace_error_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(TraceError("a.jsonl", 3, "missing 'timestamp'")))
    assert str(error) == "a.jsonl:3: missing 'timestamp'"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        pytest.param([(6758, 14), (7322, 15), (7236, 15)], 512, id="mooncake_three_lines"),
        pytest.param([(65974, 128), (72441, 141)], 512, id="full_blocks_only"),
        pytest.param([(700, 2)], 512, id="ceil_goes_first"),
        pytest.param([(600, 1)], None, id="several_powers_fit"),
        pytest.param([(10, 1), (40, 1)], None, id="one_power_of_a_wide_interval"),
        pytest.param([(1024, 3)], None, id="two_full_blocks_are_not_three"),
        pytest.param([(100, 0), (120, 0)], None, id="no_blocks"),
        pytest.param([(300, 3), (301, 4), (299, 3)], 100, id="one_size_not_a_power"),
        pytest.param([(650, 3), (1000, 4)], 256, id="power_before_other_sizes"),
        pytest.param([(660, 3), (1000, 4)], 256, id="power_inside_interval"),
        pytest.param([(1000, 100), (1000, 3)], None, id="no_size_fits"),
        pytest.param([(0, 1), (512, 1)], None, id="a_block_without_tokens"),
        pytest.param([(0, 0), (700, 2)], 512, id="an_empty_prompt"),
    ],
)
def test_infers_the_block_size(requests, expected):
    rows = [(0, length, 0, range(count)) for length, count in requests]
    trace = Trace.from_requests(rows, name="t")
    assert trace.block_size == expected


@pytest.mark.parametrize("counts", [(2, 2, 1, 3), (3, 3, 1, 4), (2, 2, 5, 3)])
def test_a_request_with_a_wrong_number_of_ids_is_an_error(tmp_path, counts):
    """Two full blocks of 512 and some tokens, or the full ones only; the third line is wrong."""
    lengths, needed = (1100, 1500, 1200, 2000), 3 if counts[0] == 3 else 2
    requests = zip([0] * 4, lengths, [7] * 4, map(range, counts), strict=True)
    path = written(tmp_path, json_lines(*itertools.starmap(record, requests)))
    reason = rf":3: {counts[2]} hash_ids for input_length=1200, needs {needed} as most"
    with pytest.raises(TraceError, match=reason):
        load_trace(path)
    for known in (512, None):
        save_trace(replace(load_trace(path, block_size=512), block_size=known), path)
        assert load_trace(path).block_size == known, "a saved file says it"


id_lists = st.lists(st.lists(st.integers(0, 4), unique=True, max_size=4), max_size=9)
block_lists = st.lists(
    st.lists(st.sampled_from([-1, 1, 2]), max_size=6).map(  # an id, of any size, encodes its prefix
        lambda contents: [*itertools.accumulate(contents, lambda before, own: 2**20 * before + own)]
    ),
    max_size=12,
)


@given(id_lists)
def test_ids_that_follow_two_ids_are_refused_with_both_requests(lists):
    first: dict[int, tuple[int | None, int]] = {}
    for request, ids in enumerate(lists):
        for before, block in itertools.pairwise([None, *ids]):
            other, earlier = first.setdefault(block, (before, request))
            if other != before:
                places = rf"requests\[{request}\]: hash_ids: {block} .*requests\[{earlier}\]: "
                with pytest.raises(ValueError, match=places):
                    trace_of(*lists)
                return
    assert trace_of(*lists).num_unique_blocks == len(first)


@given(block_lists, st.randoms(use_true_random=False))
def test_from_requests_keeps_order_and_identity(lists, random):
    timestamps = [random.choice([0, 1.5, 7]) for _ in lists]
    trace = trace_of(*lists, timestamps=timestamps)
    order = sorted(range(len(lists)), key=timestamps.__getitem__)
    assert trace.timestamps_ms.tolist() == [timestamps[i] for i in order]
    dense: dict[int, int] = {}
    expected = [[dense.setdefault(b, len(dense)) for b in lists[i]] for i in order]
    assert [request.block_ids.tolist() for request in trace] == expected


@given(block_lists, st.integers(0, 14), st.integers(0, 14))
def test_a_slice_is_the_trace_of_its_requests(lists, start, stop):
    trace = trace_of(*lists)
    part = trace[start:stop]
    alone = trace_of(*lists[start:stop], timestamps=range(len(lists))[start:stop])
    assert part.digest == alone.digest
    assert part.num_unique_blocks == alone.num_unique_blocks


def test_items_and_bounds():
    trace = trace_of([3, 4], [3], timestamps=[1.5, 2.5])
    request = trace[-1]
    assert isinstance(request, TraceRequest)
    assert (request.timestamp_ms, request.input_length, request.output_length) == (2.5, 1, 0)
    assert len(trace[:99]) == 2
    with pytest.raises(IndexError):
        trace[2]
    for indices in (range(2)[::-1], [2**70], [True, False], [0.0]):
        with pytest.raises(ValueError, match="must ascend"):
            trace.take(indices)
    assert repr(trace) == ("Trace('t', block_size=1, requests=2, block_references=3, unique=2)")


def test_from_requests_names_the_bad_request_and_takes_numpy_values():
    good = (np.float32(1), np.int32(5), np.int64(2), np.array([3, 4]), {"a": np.float16(0.5)})
    trace = Trace.from_requests([good, (*good[:3], [np.int64(3), 4])], name="t")
    assert requests_of(trace) == [(1.0, 5, 2, [0, 1])] * 2
    with pytest.raises(ValueError, match=r"requests\[1\]: input_length=2.5: needs an int"):
        Trace.from_requests([good, (1, 2.5, 2, [3])], name="t")
    for facts in ({"timestamp": 1}, {5: 1}, {"n": np.float32(np.inf)}):
        with pytest.raises(ValueError, match=r"requests\[0\]: ('timestamp'|5|'n'): needs a "):
            Trace.from_requests([(*good[:4], facts)], name="t")


def test_coarsened_blocks_are_runs_of_blocks():
    requests = [(0, 20, 1, [5, 6, 7, 8, 9]), (1, 16, 1, [5, 6, 7, 3]), (2, 4, 1, [5])]
    requests += [(3, 8, 1, [1, 2])]
    trace = Trace.from_requests(requests, name="t", block_size=4)
    coarse = trace.coarsened(2)
    assert coarse.block_size == 8
    assert [request.block_ids.tolist() for request in coarse] == [[0, 1], [0, 2], [], [3]]
    assert coarse.input_lengths.tolist() == [20, 16, 4, 8]
    assert trace.coarsened(1).digest == trace.digest


@pytest.mark.parametrize("name", ["t.csv", "t.json", "t.gz", "t", "empty.jsonl", "long.jsonl"])
def test_what_load_trace_would_not_read_is_not_saved(tmp_path, name, monkeypatch):
    monkeypatch.setattr("cache.traces.files.MAX_LINE_BYTES", 20)
    with pytest.raises(ValueError, match=r"must end in \.jsonl|has no requests|1 has .* 20 bytes"):
        save_trace(trace_of([1])[name == "empty.jsonl" :], tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_failed_save_leaves_the_old_file(tmp_path, suffix, monkeypatch):
    path = written(tmp_path, b"old", "t" + suffix)
    trace = trace_of([1], [2])
    lines = iter(["{}"])
    monkeypatch.setattr(json, "dumps", lambda *_, **__: next(lines, None) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_trace(trace, path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]
