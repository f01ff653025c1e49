"""PTX text to a list of instructions (PTX ISA, chapters 4 to 6: syntax, state spaces, operands).

The text has one `.entry`, registers, dynamic shared memory, local memory, constants of the module
(tables, strings), blocks with registers of their own (inline assembly, parameters of a call) and
`.loc` lines.
"""

import re
from collections import ChainMap
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from kernels.executor.faults import UnknownInstruction


@dataclass(frozen=True)
class Register:
    """A register: its place in the register file and its declared width in bits, 1 for .pred."""

    index: int
    width: int


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; base: a register, a name (parameter, shared memory) or None for 0."""

    base: Register | str | None
    offset: int


@dataclass(frozen=True)
class Negated:
    """`!%p`, a predicate operand."""

    register: Register


Operand: TypeAlias = Any
"""A Register, an Address, a Negated, a tuple of operands, or a str: a special register, a symbol,
an immediate, a label, or "_" (no destination). Translation refuses an operand that does not fit."""


@dataclass(frozen=True)
class Instruction:
    """One instruction. parts: the opcode split at its dots; predicate: (register, negated)."""

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: tuple[Any, bool] | None
    location: str
    text: str


@dataclass
class Program:
    """The kernel of a PTX text."""

    name: str
    target: str
    """"sm_80", "sm_90a" ..."""
    parameters: list[tuple[str, str]]
    """Name and type ("u64", "f32" ...) of each, in order."""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Index of the instruction that a label stands before."""
    widths: list[int] = field(default_factory=list)
    """Width in bits of each register, 1 for predicates."""
    symbols: dict[str, int] = field(default_factory=dict)
    """Address of each variable: dynamic shared memory begins at 0, local memory at LOCAL_ORIGIN;
    constants are in the memory of this process."""
    carry: Register = Register(0, 1)
    """The carry of multi-word arithmetic, a predicate."""
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """Bytes of the module's constants."""
    local_bytes: int = 0
    """Local memory of a thread."""
    max_registers: int = 0
    """.maxnreg, 0 if there is none."""


LOCAL_ORIGIN = 1 << 16
"""Where local memory begins: above 0, because addresses are subtracted from."""
PARAMETER_ORIGIN = 1 << 15
"""Where the parameters lie that are tensor maps."""
MAP = "b1024"
"""Type of such a parameter."""
_TOKEN = re.compile(
    r"""\s*(?:
        \.loc\s+(?P<file>\d+)\s+(?P<line>\d+)\s+(?P<column>\d+)[^\n/]*(?://[ ]*(?P<where>[^\n]*))?
      | //[^\n]*
      | (?P<scope>[{}])
      | (?P<label>[\w$]+):(?!:)
      | (?P<statement>[^;{}][^;]*);
    )""",
    re.VERBOSE,
)
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_LOCAL = re.compile(r"\.local\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\]")
_CONSTANT = re.compile(r"\.global\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\]\s*=\s*\{([\d,\s]*)\}")
_CALL_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(\w+)")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr[^,\n]*\s)?(\w+)(?:\[(\d+)\])?"
)


def _width(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


def _where(text: str) -> str:
    """Source line in the comment behind `.loc`, with the outermost caller's if it was inlined."""
    places = re.findall(r"[^\s@\[\]]+:\d+:\d+", text)
    if not places:
        return text.strip()
    return places[0] if len(places) == 1 else f"{places[0]} @ {places[-1]}"


class _Reader:
    """State of reading one kernel: registers and labels by name, in blocks."""

    def __init__(self, program: Program):
        self.program = program
        self.scoped: ChainMap[str, Register] = ChainMap()
        self.labels: list[dict[str, int]] = [program.labels]
        self.location = ""

    def declare(self, kind: str, names: str) -> None:
        for name in re.split(r"\s*,\s*", names.strip()):
            counted = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            every = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]
            for one in every:
                self.scoped[one] = Register(len(self.program.widths), _width(kind))
                self.program.widths.append(_width(kind))

    def operand(self, text: str) -> Operand:
        text = text.strip()
        if text[0] == "{":
            return tuple(self.operand(part) for part in text[1:-1].split(","))
        if text[0] == "[":
            base, comma, coordinates = text[1:-1].partition(",")
            if comma:  # of a tensor map
                return self.operand(f"[{base}]"), self.operand(coordinates)
            base, _, added = base.partition("+")
            base, offset = base.strip(), int(added.strip() or "0", 0)
            if re.fullmatch(r"-?(0x)?[\da-fA-F]+", base):
                return Address(None, int(base, 0) + offset)
            return Address(self.scoped.get(base, base), offset)
        if "|" in text:
            return tuple(self.operand(part) for part in text.split("|"))
        if text[0] == "!":
            return Negated(self.scoped[text[1:].strip()])
        return self.scoped.get(text, text)

    def statement(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text).strip()
        if declared := _REGISTERS.fullmatch(text) or _CALL_PARAMETER.fullmatch(text):
            self.declare(*declared.groups())
            return
        if declared := _LOCAL.fullmatch(text):
            start = -(-self.program.local_bytes // 16) * 16
            self.program.symbols[declared[1]] = LOCAL_ORIGIN + start
            self.program.local_bytes = start + int(declared[2])
            return
        text = " ".join(text.split())
        if not text or text.startswith(".pragma"):
            return
        matched = _INSTRUCTION.fullmatch(text)
        if text[0] == "." or not matched:
            raise UnknownInstruction(self.program.name, text, self.location)
        negated, predicate, opcode, rest = matched.groups()
        if opcode.startswith("call"):
            rest = re.sub("[()]", "", rest)
        split = _OPERAND.findall(rest) if "{" in rest else rest.split(",")
        try:
            operands = tuple(self.operand(operand) for operand in split if operand.strip())
        except (ValueError, IndexError):
            why = "its operands cannot be read"
            raise UnknownInstruction(self.program.name, text, self.location, why) from None
        guard = None if predicate is None else (self.scoped.get(predicate), negated == "!")
        parts = tuple(opcode.split("."))
        self.program.instructions.append(
            Instruction(opcode, parts, operands, guard, self.location, text)
        )

    def close_labels(self, labels: dict[str, int]) -> None:
        """Give the labels of a block that ends unique names."""
        if not labels:  # most blocks: of inline assembly
            return
        names = {label: f"{label}@{at}" for label, at in labels.items()}
        for number, one in enumerate(self.program.instructions):
            if names.keys() & {*one.operands}:
                operands = tuple(names.get(operand, operand) for operand in one.operands)
                self.program.instructions[number] = replace(one, operands=operands)
        self.program.labels |= {names[label]: at for label, at in labels.items()}

    def read(self, body: str) -> None:
        at = 0
        while token := _TOKEN.match(body, at):
            at = token.end()
            if token["line"]:
                place = token["where"] or f"file {token['file']}:{token['line']}:{token['column']}"
                self.location = _where(place)
            elif token["scope"] == "{":
                self.scoped = self.scoped.new_child()
                self.labels.append({})
            elif token["scope"] == "}":
                if len(self.labels) == 1:
                    return
                self.scoped = self.scoped.parents
                self.close_labels(self.labels.pop())
            elif token["label"]:
                self.labels[-1][token["label"]] = len(self.program.instructions)
            elif token["statement"]:
                self.statement(token["statement"])
        raise ValueError(f"{self.program.name}: PTX ends inside the kernel: {body[at : at + 80]!r}")


def parse(ptx: str) -> Program:
    """Read the one kernel of a PTX text.

    Raises:
        ValueError: no kernel, or more than one.
        UnknownInstruction: an unsupported declaration.
    """
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", ptx))
    if len(entries) != 1:
        raise ValueError(f"ptx: expected one .entry, found {len(entries)}")
    entry = entries[0]
    head = re.sub(r"//[^\n]*", "", ptx[: entry.start()])
    shared = re.findall(r"\.extern\s+\.shared[^;]*?([\w$]+)\[\]\s*;", head)
    constants = {
        name: np.array([*map(int, values.split(",")), *[0] * int(size)][: int(size)], np.uint8)
        for name, size, values in _CONSTANT.findall(head)
    }
    program = Program(
        name=entry[1],
        target=re.findall(r"\.target\s+(\w+)", ptx)[0],
        parameters=[
            (name, f"b{8 * int(count)}" if count else kind)
            for kind, name, count in _PARAMETER.findall(entry[2])
        ],
        symbols=dict.fromkeys(shared, 0) | {name: x.ctypes.data for name, x in constants.items()},
        constants=constants,
    )
    program.widths.append(program.carry.width)
    for number, (name, kind) in enumerate(program.parameters):
        if kind == MAP:
            program.symbols[name] = PARAMETER_ORIGIN + 128 * number
    header = ptx[entry.end() : ptx.index("{", entry.end())]
    program.max_registers = int(*re.findall(r"\.maxnreg\s+(\d+)", header) or ["0"])
    reader = _Reader(program)
    reader.read(ptx[ptx.index("{", entry.end()) + 1 :])
    reader.statement("ret")  # for a kernel that ends without one
    return program
