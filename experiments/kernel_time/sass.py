"""Cycles that one warp needs for machine code, from the control codes that ptxas wrote.

Every instruction encodes a stall count, two scoreboards that it may set, and the scoreboards that
it waits for. The layout is from Jia et al., "Dissecting the NVIDIA Volta GPU architecture via
microbenchmarking", 2018. Latencies of instructions are assumed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_CYCLES = {
    "LDGSTS|MUFU|I2F|F2I|F2F|FRND|POPC|FLO|STG|RED": 20,
    "LDG.*[.]64": 38,  # page numbers, which L1 holds
    "LDG[.]|LD[.]|LD$|ATOM": None,
    "LDSM|HMMA|HGMMA|QGMMA|IMMA|QMMA|OMMA": 33,
    "LDS": 29,
    "STS": 18,
    "SHFL|REDUX": 24,
    "S2R|S2UR|LDC|ULDC|R2UR|CS2R": 25,
    "": 12,
}
"""Cycles by opcode; None is the latency of memory."""
_BARRIER = 20
_TENSOR = "HMMA|HGMMA|QGMMA|QMMA|OMMA|IMMA|UTC.*MMA"
_NEAR, _FAR = 150, 600
"""Latencies of memory, in cycles, at which code is timed."""


class Instruction(NamedTuple):
    address: int
    text: str
    opcode: str
    stall: int
    sets: tuple[int, int]
    """Scoreboards for the result and for the release of the operands; 7 means no scoreboard."""
    waits: int
    """Bit mask of the scoreboards that the instruction waits for."""


def parse(sass: str) -> list[Instruction]:
    """The instructions in the output of ``cuobjdump -sass``."""
    encoded = r"/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x\w{16} \*/\s+/\* 0x(\w{16}) \*/"
    code = []
    for address, text, control in re.findall(encoded, sass):
        opcode, bits = re.sub(r"^@!?U?P\w+\s+", "", text.strip()).split()[0], int(control, 16)
        boards = bits >> 46 & 7, bits >> 49 & 7
        words = int(address, 16), text, opcode, bits >> 41 & 15, boards, bits >> 52 & 63
        code.append(Instruction(*words))
    return code


def cycles(code: Sequence[Instruction], latency: int, passes: int = 1) -> int:
    """Cycles of the last of ``passes`` through a loop.  A single pass waits for all results.

    Asynchronous copies arrive ``latency`` cycles after they were issued.
    """
    now = start = copied = 0
    ready, groups = [0] * 6, []
    for _ in range(passes):
        start = now
        for one in code:
            now = max([now, *(ready[board] for board in range(6) if one.waits >> board & 1)])
            took = next(known for name, known in _CYCLES.items() if re.match(name, one.opcode))
            took = latency if took is None else took
            if one.opcode.startswith("LDGSTS"):
                copied = now + latency
            elif one.opcode.startswith("LDGDEPBAR"):
                groups.append(max(copied, now))
            elif pending := re.search(r"^DEPBAR.* (0x[0-9a-f]+)", f"{one.opcode} {one.text}"):
                while len(groups) > int(pending[1], 16):
                    now = max(now, groups.pop(0))
            elif one.opcode.startswith("BAR"):
                now += _BARRIER
            for board, until in zip(one.sets, (took, min(took, 20)), strict=True):
                if board != 7:
                    ready[board] = max(ready[board], now + until)
            now += max(1, one.stall)
    return (now if passes > 1 else max(now, *ready)) - start


def timings(code: Sequence[Instruction], which: int) -> dict[str, Any]:
    """Columns of ``kernels.csv``: a pass of the loop over tiles, and the code outside loops.

    Cycles are linear in the latency of memory: a constant plus a number of round trips. The loop
    over tiles is the innermost loop with the most tensor-core instructions, or the most loads. If
    several loops qualify, ``which`` is its index: SGLang's second loop is over new keys, our second
    loop over masked keys. The remaining loops are not entered.
    """
    index_of = {one.address: index for index, one in enumerate(code)}
    loops = []
    for end, one in enumerate(code):
        target = re.search(r"BRA.*?(0x[0-9a-f]+)", one.text)
        if target and (begin := index_of.get(int(target[1], 16), end)) < end:
            loops.append(range(begin, end + 1))

    def count(loop: range, names: str) -> int:
        return sum(bool(re.match(names, code[index].opcode)) for index in loop)

    working = _TENSOR if any(count(loop, _TENSOR) for loop in loops) else "LDG"
    loops = [loop for loop in loops if count(loop, working)]
    loops = [a for a in loops if not any(b != a and set(b) <= set(a) for b in loops)]
    most = max(count(loop, working) for loop in loops)
    tile = [loop for loop in loops if count(loop, working) >= 0.7 * most][which]
    outside = [index for index in range(len(code)) if not any(index in loop for loop in loops)]
    before = [code[index] for index in outside if index < tile.start]
    after = [code[index] for index in outside if index >= tile.stop]
    ends = [one.opcode == "EXIT" and "@" not in one.text for one in after] + [True]
    result: dict[str, float]
    result = dict.fromkeys(("fixed_cycles", "fixed_trips", "tile_cycles", "tile_trips"), 0)
    for name, part, passes in (
        ("fixed", before, 1),
        ("fixed", after[: ends.index(True) + 1], 1),
        ("tile", [code[index] for index in tile], 4),
    ):
        near, far = (cycles(part, latency, passes) for latency in (_NEAR, _FAR))
        trips = round((far - near) / (_FAR - _NEAR), 2)
        result[f"{name}_cycles"] += round(near - trips * _NEAR)
        result[f"{name}_trips"] = round(result[f"{name}_trips"] + trips, 2)
    shared = [code[index].opcode for index in tile if re.match("LDS|STS", code[index].opcode)]
    wide = sum(bool(re.search("[.]128|M88[.]4", opcode)) for opcode in shared)
    half = sum(bool(re.search("[.]64|M88[.]2", opcode)) for opcode in shared)
    wavefronts = len(shared) + 3 * wide + half
    spills = count(tile, "LDL|STL")
    return {**result, "instructions": len(tile), "wavefronts": wavefronts, "spills": spills}
