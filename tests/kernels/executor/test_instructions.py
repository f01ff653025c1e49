"""Instructions one by one, compared with Python's integers, exact fractions and PyTorch."""

import math
import random
import re
import struct
from fractions import Fraction

import pytest
import torch

from .conftest import caught

WORDS = [0, 1, 2, 7, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF, 0x80000001]
FLOATS = [0.0, -0.0, 1.0, -1.5, 3.0e38, 1e-40, -1e-38, float("inf"), float("nan"), 65504.0, 65520.0]
FLOATS += [0.1, 448.0, 464.0, 500.0, -0.001, 2**-9, 2**-10, 3 * 2**-10, 2**-20, 1 + 2**-8]
FLOATS += [1 + 3 * 2**-8]


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def float_of(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0]


@pytest.fixture
def compute(run_body):
    """Function that runs instructions on triples of 32-bit words, one triple per thread, in %r1,
    %r2 and %r3, and returns the values of %r4 (of %d4, with wide)."""

    def run(text: str, triples: list[tuple], *, wide: bool = False) -> list[int]:
        unit = 1024 if len(triples) > 1024 else 32
        count = -(-len(triples) // unit) * unit
        rows = [*triples, *[triples[-1]] * (count - len(triples))]
        given = torch.tensor([[row[i] if i < len(row) else 0 for row in rows] for i in range(3)])
        given = given.where(given < 2**31, given - 2**32).to(torch.int32)
        out = torch.zeros(count, dtype=torch.int64)
        loads = "".join(f"ld.global.b32 %r{i + 1}, [%d12+{4 * count * i}];" for i in range(3))
        result = "" if wide else "cvt.u64.u32 %d4, %r4;"
        run_body(
            "mov.u32 %r90, %ctaid.x; mad.lo.u32 %r91, %r90, 1024, %r0; cvt.u64.u32 %d10, %r91;"
            f"shl.b64 %d11, %d10, 2; add.s64 %d12, %d0, %d11; {loads} {text} {result}"
            "shl.b64 %d13, %d10, 3; add.s64 %d14, %d1, %d13; st.global.b64 [%d14], %d4;",
            given.flatten(),
            out,
            num_warps=min(count // 32, 32),
            grid=(-(-count // 1024), 1, 1),
        )
        mask = 2**64 - 1 if wide else 2**32 - 1
        return [value & mask for value in out[: len(triples)].tolist()]

    return run


TRIPLES = [(a, b, WORDS[(a + 3 * b) % 13]) for a in WORDS for b in WORDS]


def _extracted(a: int, start: int, length: int, width: int, opcode: str) -> int:
    value = signed(a, width) if opcode == "bfe.s" else a  # beyond the top the sign repeats
    field = (value >> start) & ((1 << length) - 1)
    if opcode == "bfe.s" and length:
        field |= -1 << length if value >> min(start + length - 1, width - 1) & 1 else 0
    return field


def _inserted(a: int, b: int, start: int, length: int) -> int:
    field = (1 << length) - 1
    return b & ~(field << start) | (a & field) << start


def _looked_up(table: int, words: tuple) -> int:
    rows = [
        sum((word >> place & 1) << 2 - n for n, word in enumerate(words)) for place in range(32)
    ]
    return sum((table >> row & 1) << place for place, row in enumerate(rows))


def _permuted(a: int, b: int, selectors: int) -> int:
    data, result = (b << 32 | a).to_bytes(8, "little"), 0
    for place in range(4):
        selector = selectors >> 4 * place & 15
        byte = data[selector & 7]
        result |= (255 * (byte >> 7) if selector & 8 else byte) << 8 * place
    return result


# Opcode: its result from the words in %r1, %r2 and %r3.
INTEGERS = {
    "mul.hi.u32": lambda a, b, _: a * b >> 32,
    "mul.hi.s32": lambda a, b, _: signed(a) * signed(b) >> 32,
    "min.relu.s32": lambda a, b, _: max(0, min(signed(a), signed(b))),
    "and.b32 %r2, %r2, 31; shr.s32": lambda a, b, _: signed(a) >> (b & 31),
    "max.u32 %r2, %r2, 1; div.u32": lambda a, b, _: a // max(b, 1),
    "max.u32 %r2, %r2, 1; rem.u32": lambda a, b, _: a % max(b, 1),
    "max.u32 %r2, %r2, 1; div.s32": lambda a, b, _: Fraction(signed(a), signed(max(b, 1))),
    "max.u32 %r2, %r2, 1; rem.s32": lambda a, b, _: math.fmod(signed(a), signed(max(b, 1))),
    "mad.lo.cc.u32 %r5, %r1, %r2, %r3; mov.b32 %r3, 0; madc.hi.u32": (
        lambda a, b, c: a * b + c >> 32
    ),
    "prmt.b32": _permuted,
    **{
        f"lop3.b32 {table:#x}": lambda *words, table=table: _looked_up(table, words)
        for table in (0x80, 0x96, 0xF8, 0x1B)
    },
    "shf.l.wrap.b32": lambda a, b, by: (b << 32 | a) << (by & 31) >> 32,
    "shf.r.wrap.b32": lambda a, b, by: (b << 32 | a) >> (by & 31),
}


@pytest.mark.parametrize("opcode", INTEGERS)
def test_integers(compute, opcode):
    expected = [int(INTEGERS[opcode](*triple)) & 0xFFFFFFFF for triple in TRIPLES]
    text, _, table = opcode.partition("lop3.b32 ")
    operands = "%r4, %r1, %r2" + ", %r3" * bool(re.search("prmt|shf|madc|lop3", opcode))
    text = f"lop3.b32 {operands}, {table};" if table else f"{text} {operands};"
    assert compute(text, TRIPLES) == expected


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("opcode", ["bfe.u", "bfe.s", "bfi.b"])
def test_bit_fields(compute, opcode, width):
    """Place and size of each field are in %r3. bfi inserts into the complement."""
    fields = [(at, n) for at in (0, 5, 31, 32, 63, 255) for n in (0, 1, 8, 27, 32, 64, 255)]
    cases = [(low, high, *field) for low in WORDS for high in (1, 0xDEADBEEF) for field in fields]
    text = f"mov.b64 %d5, {{%r1, %r2}}; not.b64 %d6, %d5; shr.u32 %r6, %r3, 8; {opcode}{width} "
    text += f"%d4, %d5, {'%d6, ' * (opcode == 'bfi.b')}%r3, %r6;"
    mask = (1 << width) - 1
    got = compute(text, [(low, high, at | size << 8) for low, high, at, size in cases], wide=True)
    for word, (low, high, *field) in zip(got, cases, strict=True):
        a = (high << 32 | low) & mask
        expected = _extracted(a, *field, width, opcode)
        if opcode == "bfi.b":
            expected = _inserted(a, ~a, *field)
        assert word & mask == expected & mask


@pytest.mark.parametrize("letter", "us")
def test_products_of_twice_the_width(compute, letter):
    values = (lambda x: x) if letter == "u" else signed
    text = f"cvt.s64.s32 %d5, %r3; mad.wide.{letter}32 %d4, %r1, %r2, %d5;"
    expected = [(values(a) * values(b) + signed(c)) & (2**64 - 1) for a, b, c in TRIPLES]
    assert compute(text, TRIPLES, wide=True) == expected


def test_fused_products_round_once(compute):
    rng = random.Random(0)
    triples = [
        tuple(bits_of(rng.uniform(-2, 2) * 2.0 ** rng.randrange(-20, 20)) for _ in range(3))
        for _ in range(500)
    ]
    # Rounded to f64 first, these would be rounded the wrong way: a tie that a tiny addend breaks.
    triples.append((bits_of(1 + 2**-12), bits_of(1 + 2**-12), bits_of(2.0**-80)))
    for word, triple in zip(
        compute("fma.rn.f32 %r4, %r1, %r2, %r3;", triples), triples, strict=True
    ):
        a, b, c = (Fraction(float_of(x)) for x in triple)
        exact, got = a * b + c, Fraction(float_of(word))
        near = [Fraction(float_of(word + step)) for step in (-1, 1)]
        assert all(abs(got - exact) <= abs(other - exact) for other in near)


def test_subnormal_numbers_are_flushed_where_asked(compute):
    tiny = [(bits_of(1e-40), bits_of(2.0)), (bits_of(-1e-40), bits_of(2.0))]
    kept = [float_of(x) for x in compute("mul.f32 %r4, %r1, %r2;", tiny)]
    assert kept[0] == -kept[1] != 0.0
    flushed = compute("mul.ftz.f32 %r4, %r1, %r2;", tiny)
    assert flushed == [0, 0x80000000]


@pytest.mark.parametrize(("opcode", "nan"), [("max.f32", False), ("max.NaN.f32", True)])
def test_maximum_and_nan(compute, opcode, nan):
    pairs = [(bits_of(float("nan")), bits_of(2.0)), (bits_of(-1.0), bits_of(float("nan")))]
    got = [float_of(x) for x in compute(f"{opcode} %r4, %r1, %r2;", pairs)]
    assert all(x != x for x in got) if nan else got == [2.0, -1.0]
    zeros = [(0, 1 << 31), (1 << 31, 0), (0, 0), (1 << 31, 1 << 31)]
    assert compute(f"{opcode} %r4, %r1, %r2;", zeros) == [0, 0, 0, 1 << 31]
    least = compute(f"{opcode.replace('max', 'min')} %r4, %r1, %r2;", zeros)
    assert least == [1 << 31, 1 << 31, 0, 1 << 31]


HALVES = "mov.b32 {%h1, %h2}, %r1; mov.b32 {%h3, %h4}, %r2;"
# Type: its numbers in PyTorch, instructions before the comparison, operands.
COMPARED = {
    "f32": (torch.float32, "", "%r1, %r2"),
    "f64": (torch.float32, "cvt.f64.f32 %d5, %r1; cvt.f64.f32 %d6, %r2;", "%d5, %d6"),
    "f16": (torch.float16, HALVES, "%h1, %h3"),
    "bf16": (torch.bfloat16, HALVES, "%h1, %h3"),
    "f16x2": (torch.float16, "", "%r1, %r2"),
    "bf16x2": (torch.bfloat16, "", "%r1, %r2"),
}


@pytest.mark.parametrize("kind", [*COMPARED, "ftz.f32", "ftz.f16", "ftz.f16x2"])
@pytest.mark.parametrize(
    ("comparison", "holds", "of_nan"),
    [
        ("lt", lambda a, b: a < b, False),
        ("ne", lambda a, b: a != b, False),
        ("neu", lambda a, b: a != b, True),
        ("geu", lambda a, b: a >= b, True),
        ("equ", lambda a, b: a == b, True),
        ("num", lambda a, b: True, False),
        ("nan", lambda a, b: False, True),
    ],
)
def test_comparisons_of_floats(compute, comparison, holds, of_nan, kind):
    """Of two numbers, or of two pairs. The second predicate is the upper half's, or opposite."""
    dtype, before, operands = COMPARED[kind.removeprefix("ftz.")]
    lower = torch.cartesian_prod(*[torch.tensor(FLOATS).to(dtype)] * 2)
    given = torch.stack([lower, lower.flip(0)] if dtype.itemsize == 2 else [lower], 2)
    words = given.view(torch.int32).view(-1, 2).long() & 0xFFFFFFFF
    least = torch.finfo(dtype).tiny if "ftz" in kind else 0

    def expected(pair):
        a, b = (0.0 if abs(x) < least else x for x in pair)
        return of_nan if a != a or b != b else holds(a, b)

    text = f"{before} setp.{comparison}.{kind} %p1|%p2, {operands}; selp.b32 %r4, 1, 0, %p1;"
    text += f"setp.{comparison}.and.{kind} %p3, {operands}, !%p2; @%p2 or.b32 %r4, %r4, 2;"
    found = compute(text + "@%p3 or.b32 %r4, %r4, 4;", words.tolist())
    for got, pairs in zip(found, given.mT.tolist(), strict=True):
        first, second = expected(pairs[0]), expected(pairs[-1])
        second = second if "x2" in kind else not first
        assert got == first + 2 * second + 4 * (first and not second)


F16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TWO_HALVES = "mov.b32 {%h1, %h2}, %r1; OP %h3, %h1; OP %h4, %h2; mov.b32 %r4, {%h3, %h4};"
FROM_BYTES, TO_BYTES = "cvt.u16.u32 %h1, %r1; OP %r4, %h1;", "OP %h1, %r1; cvt.u32.u16 %r4, %h1;"
# Opcode: instructions that convert the two numbers in %r1 (f32: in %r1 and %r2), their types.
CONVERSIONS = {
    "cvt.rn.bf16.f16": (TWO_HALVES, F16, BF16),
    "cvt.bf16.f16": (TWO_HALVES, F16, BF16),
    "cvt.rn.f16x2.f32": ("OP %r4, %r2, %r1;", torch.float32, F16),
    "cvt.rn.bf16x2.f32": ("OP %r4, %r2, %r1;", torch.float32, BF16),
    "cvt.rn.f16x2.e4m3x2": (FROM_BYTES, E4M3, F16),
    "cvt.rn.f16x2.e5m2x2": (FROM_BYTES, E5M2, F16),
    "cvt.rn.satfinite.e4m3x2.f16x2": (TO_BYTES, F16, E4M3),
    "cvt.rn.satfinite.e4m3x2.f32": (TO_BYTES.replace("%r1", "%r2, %r1"), torch.float32, E4M3),
    "cvt.rn.satfinite.e5m2x2.f32": (TO_BYTES.replace("%r1", "%r2, %r1"), torch.float32, E5M2),
}


def _hard_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a narrow type; or floats at, and next to, the middle between neighbours of
    narrower formats."""
    if dtype.itemsize < 4:
        unsigned = torch.uint8 if dtype.itemsize == 1 else torch.uint16
        return torch.arange(1 << 8 * dtype.itemsize).to(unsigned).view(dtype)
    halves = torch.arange(0x7C00, dtype=torch.int16).view(F16).float()
    bf16 = (torch.arange(0x7F80) << 16).to(torch.int32).view(torch.float32)
    values = torch.cat([halves, (halves[1:] + halves[:-1]) / 2, bf16, (bf16[1:] + bf16[:-1]) / 2])
    values = torch.cat([values[::7], torch.tensor(FLOATS)])
    around = [values, values.nextafter(torch.tensor(9e9)), values.nextafter(torch.tensor(0.0))]
    return torch.cat([*around, *[-x for x in around]])


@pytest.mark.parametrize("opcode", CONVERSIONS)
def test_conversions(compute, opcode):
    """Equal to PyTorch's, bit for bit. A NaN stays one, whatever its payload."""
    text, source, target = CONVERSIONS[opcode]
    values = _hard_numbers(source)
    rows = values.view(torch.uint8).reshape(-1, 2 * source.itemsize)
    words = torch.nn.functional.pad(rows, (0, 8 - rows.shape[1])).view(torch.int32).long()
    got = torch.tensor(compute(text.replace("OP", opcode), (words & 0xFFFFFFFF).tolist()))
    found = got.view(torch.uint8).reshape(-1, 8)[:, : 2 * target.itemsize].flatten().view(target)
    most = torch.finfo(target).max if "satfinite" in opcode else float("inf")
    expected = values.float().clamp(-most, most).to(target)
    assert torch.equal(found.isnan(), expected.isnan())
    bits = (
        x.view(torch.uint8).view(-1, target.itemsize)[~expected.isnan()] for x in (found, expected)
    )
    assert torch.equal(*bits)


@pytest.mark.parametrize(
    ("kind", "dtype", "one"), [("f16", torch.float16, 0x3C00), ("bf16", torch.bfloat16, 0x3F80)]
)
def test_narrow_and_wide_floats_together(compute, kind, dtype, one):
    """a (+ or -, or times 1 +) b, as f32, of a narrow a."""
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    a = a.to(dtype)
    pairs = [(x & 0xFFFF, bits_of(y)) for x, y in zip(a.view(torch.int16).tolist(), b, strict=True)]
    for text, expected in (
        (f"add.rn.f32.{kind} %r4, %h1, %r2;", a.float() + b),
        (f"sub.rn.f32.{kind} %r4, %h1, %r2;", a.float() - b),
        (f"mov.b16 %h2, {one}; fma.rn.f32.{kind} %r4, %h1, %h2, %r2;", a.float() + b),
    ):
        got = compute("cvt.u16.u32 %h1, %r1;" + text, pairs)
        assert [signed(word) for word in got] == expected.view(torch.int32).tolist()


def test_integers_from_floats_saturate(compute):
    given = [(bits_of(x),) for x in (1.5, 2.5, -2.5, 3e9, -3e9, float("nan"), float("inf"))]
    for mode, first in (("rni", 2), ("rzi", 1)):
        got = [signed(x) for x in compute(f"cvt.{mode}.s32.f32 %r4, %r1;", given)]
        assert got == [first, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    got = compute("cvt.rni.s64.f32 %d4, %r1;", given, wide=True)
    assert [signed(x, 64) for x in got[3:]] == [3 * 10**9, -3 * 10**9, -(2**63), 2**63 - 1]
    got = compute("cvt.f64.f32 %d5, %r1; cvt.rzi.u32.f64 %r4, %d5;", given)
    assert got[-2:] == [2**31, 2**32 - 1]


@pytest.mark.parametrize(
    ("mode", "argument", "control", "source"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 <= 31 else lane),
        ("idx", 9, 31, lambda lane: 9),
        ("idx", 9, 0x181F, lambda lane: (lane & 24) | 1),
        ("down", 2, 0x1C1F, lambda lane: lane + 2 if lane % 4 < 2 else lane),
    ],
)
def test_shuffles(compute, mode, argument, control, source):
    words = [(lane * lane + 1,) for lane in range(32)]
    got = compute(f"shfl.sync.{mode}.b32 %r4, %r1, {argument}, {control}, -1;", words)
    assert got == [source(lane) ** 2 + 1 for lane in range(32)]


def test_reductions_of_a_warp_and_of_a_part(compute):
    words = [(lane * 977 % 101 - 50 & 0xFFFFFFFF,) for lane in range(64)]
    got = compute("redux.sync.max.s32 %r4, %r1, -1;", words)
    half = "and.b32 %r5, %r0, 31; setp.lt.u32 %p1, %r5, 16; selp.b32 %r6, 0xffff, 0xffff0000, %p1;"
    half += "@%p1 redux.sync.{0} %r4, %r1, %r6; @!%p1 redux.sync.{0} %r4, %r1, %r6;"
    parts = compute(half.format("max.s32"), words), compute(half.format("add.s32"), words)
    for first in range(0, 64, 16):
        warp = first // 32 * 32
        assert {signed(x) for x in got[first : first + 16]} == {
            max(signed(word) for (word,) in words[warp : warp + 32])
        }
        values = [signed(word) for (word,) in words[first : first + 16]]
        for part, expected in zip(parts, (max(values), sum(values)), strict=True):
            assert {signed(x) for x in part[first : first + 16]} == {expected}


def test_votes_and_elections(compute):
    words = [(lane % 3 == 0,) for lane in range(64)]
    holds = "setp.ne.u32 %p1, %r1, 0;"
    ballots = compute(holds + "vote.sync.ballot.b32 %r4, %p1, -1;", words)
    for first in (0, 32):
        expected = sum(1 << lane for lane in range(32) if (first + lane) % 3 == 0)
        assert set(ballots[first : first + 32]) == {expected}
    elect = "mov.u32 %r4, 99; and.b32 %r6, %r0, 31; setp.ge.u32 %p3, %r6, 5;"
    elect += "@%p3 elect.sync %r5|%p2, 0xffffffe0; @%p3 selp.b32 %r4, %r5, 77, %p2;"
    assert compute(elect, words) == 2 * [99, 99, 99, 99, 99, 5, *[77] * 26]


@pytest.mark.parametrize(
    ("kind", "a", "b", "c", "expected"),
    [
        ("k32.row.col.satfinite.s32.s8.s8.s32", 0x01010101, 0xFEFEFEFE, 7, -2 * 32 + 7),
        ("k32.row.col.s32.u8.s8.s32", 0xFFFFFFFF, 0x01010101, 7, 255 * 32 + 7),
        # 2049 is no f16: 1 + 16 * 128 is rounded to 2048, and 2 + 16 * 128 stays.
        ("k16.row.col.f16.f16.f16.f16", 0x3C003C00, 0x58005800, 0x40003C00, 0x68016800),
    ],
)
def test_products(compute, kind, a, b, c, expected):
    d, count = ("%r4, %r5", 2) if "f16" in kind else ("%r4, %r5, %r6, %r7", 4)
    text = f"""
    mov.b32 %r10, {a}; mov.b32 %r11, {b}; mov.b32 %r12, {c};
    mma.sync.aligned.m16n8{kind} {{{d}}}, {{%r10, %r10, %r10, %r10}}, {{%r11, %r11}},
      {{{", ".join(["%r12"] * count)}}};
    """
    assert {signed(x) for x in compute(text, [(0,)] * 32)} == {expected}


RESULT = "shl.b64 %d11, %d10, 2; add.s64 %d12, %d0, %d11; st.global.b32 [%d12], %r2;"
LOCAL = """
.local .align 4 .b8 depot[8];
mov.b64 %d13, depot; cvt.u32.u64 %r1, %d13; sub.s32 %r1, %r1, 8;
st.local.b32 [%r1+12], %r0; bar.sync 0; ld.local.b32 %r2, [%d13+4];
"""


ADD = "mov.b32 %r1, 0; st.shared.b32 [0], %r1; bar.sync 0; atom.shared.add.u32 %r2, [0], 1;"


@pytest.mark.parametrize("seed", [None, 0])
def test_atomics_on_shared_memory(run_body, seed):
    """Each program of a batch has its own counter."""
    out = torch.zeros(64, dtype=torch.int32)
    options = {"num_warps": 2, "shared_bytes": 4, "seed": seed}
    run_body(ADD + RESULT, out, **options)
    assert sorted(out.tolist()) == [*range(64)]
    last = (
        "bar.sync 0; ld.shared.b32 %r2, [0]; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r3, %r3, 64, %r0;"
    )
    out = torch.zeros(128, dtype=torch.int32)
    run_body(ADD + last + "cvt.u64.u32 %d10, %r3;" + RESULT, out, grid=(2, 1, 1), **options)
    assert out.tolist() == [64] * 128


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (LOCAL + "ld.local.b32 %r2, [%d13+8];", "OUT_OF_BOUNDS"),
        (LOCAL + "ld.local.b32 %r2, [%r1+4];", "OUT_OF_BOUNDS"),
        (LOCAL + "ld.local.b32 %r2, [%d13];", "UNWRITTEN"),
        (LOCAL + "ld.global.b32 %r2, [%d13];", "OUT_OF_BOUNDS"),
        (ADD + "ld.shared.b32 %r3, [0];", "SHARED_RACE"),
        (ADD + "st.shared.b32 [0], %r1;", "SHARED_RACE"),
        ("atom.shared.add.u32 %r2, [0], 1;", "UNWRITTEN"),
        ("red.shared.add.u32 [4], 1;", "OUT_OF_BOUNDS"),
    ],
)
def test_faults_in_local_memory_and_of_shared_atomics(run_body, body, kind):
    assert caught(run_body, body, torch.zeros(1), num_warps=2, shared_bytes=4).kind.name == kind
