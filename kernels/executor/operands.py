"""Register operands, and the table of instructions.

A register of a batch is a NumPy array of unsigned integers (booleans for predicates). It has one
element per thread, or a single element if all threads hold the same value. Arrays are never written
in place, so registers may share one.

Each instruction is translated once into a function `step(batch, mask)`. mask holds the threads that
execute the instruction; None means all running threads. Results of other threads are not used.

Widths follow the PTX ISA, "Operand size exceeding instruction-type size" (9.4.1). A wider source
register is truncated to its low bits. A result narrower than its register is sign-extended if its
type is signed, else zero-extended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kernels.executor.faults import UnknownInstruction
from kernels.executor.ptx import Address, Instruction, Negated, Operand, Program, Register
from kernels.executor.targets import refusal
from kernels.executor.undefined import Effects

if TYPE_CHECKING:
    from kernels.executor.machine import Batch

Read = Callable[["Batch"], np.ndarray]
Write = Callable[["Batch", np.ndarray | None, np.ndarray], None]
Step = Callable[["Batch", np.ndarray | None], object]


class Signal(NamedTuple):
    """A change of control flow: threads branch to a label, exit, reach a barrier (target: number,
    count of threads, 0 for all, and whether they wait), or yield to other threads before they go on
    or repeat the instruction."""

    kind: str  # "branch", "exit", "barrier", "yield" or "again"
    mask: np.ndarray | None  # None: all active threads
    target: Any = ""


UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
DTYPES = {
    **{f"{letter}{width}": UNSIGNED[width] for letter in "bu" for width in (8, 16, 32, 64)},
    **{f"s{width}": SIGNED[width] for width in SIGNED},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "pred": np.bool_,
}
"""NumPy dtype of each PTX type that has one."""
PACKED = {"bf16": "b16", "f16x2": "b32", "bf16x2": "b32", "tf32": "b32", "e4m3x2": "b16"}
PACKED |= {"e5m2x2": "b16", "f32x2": "b64"}
"""Bit type in which registers hold the PTX types without a NumPy dtype."""


def is_float(kind: str) -> bool:
    """Whether a PTX type is a floating-point type."""
    return "f" in kind


class Unsupported(Exception):
    """This form of an instruction is not supported, with a reason; becomes UnknownInstruction."""


class Translation:
    """One instruction during its translation to a `step`; gives access to its operands."""

    def __init__(self, program: Program, instruction: Instruction):
        self.program, self.instruction = program, instruction
        self.parts, self.operands = instruction.parts, instruction.operands
        self.effects = Effects()

    @property
    def kind(self) -> str:
        """The last part of the opcode, usually the type of the operands."""
        return self.parts[-1]

    def expect(self, *known: str) -> None:
        """Raise Unsupported for a part of the opcode, between first and last, not in `known`."""
        for part in self.parts[1:-1]:
            if part not in known:
                raise Unsupported(f".{part} is not supported")

    def one_of(self, choices, default=None):
        """The part of the opcode that is in `choices`, or `default` if there is none."""
        found = [part for part in self.parts[1:] if part in choices]
        if len(found) > 1 or (not found and default is None):
            raise Unsupported(f"expected one of {', '.join(choices)}")
        return found[0] if found else default

    def read(self, operand: Operand, kind: str) -> Read:
        """Function that reads an operand as an array with the dtype of `kind`."""
        dtype = DTYPES[PACKED.get(kind, kind)]
        if isinstance(operand, Negated):
            inner = self.read(operand.register, "pred")
            return lambda batch: ~inner(batch)
        if isinstance(operand, Register):
            self.effects.reads.append(operand.index)
            index, width = operand.index, operand.width
            wanted = 1 if kind == "pred" else np.dtype(dtype).itemsize * 8
            if width == 1 or wanted == 1:
                if width != wanted:
                    raise Unsupported("a predicate and a number cannot be mixed")
                return lambda batch: batch.registers[index]
            if width == wanted:
                return lambda batch: batch.registers[index].view(dtype)
            if width < wanted:
                raise Unsupported(f"a {width}-bit register cannot be read as .{kind}")
            low = UNSIGNED[wanted]
            return lambda batch: batch.registers[index].astype(low).view(dtype)
        if not isinstance(operand, str):
            raise Unsupported("expected a register or an immediate")
        if operand.startswith("%"):
            if operand not in SPECIAL_REGISTERS:
                raise Unsupported(f"special register {operand} is not supported")
            return lambda batch: batch.special[operand].astype(dtype, copy=False)
        constant = self._constant(operand, kind, dtype)
        return lambda batch: constant

    def _constant(self, text: str, kind: str, dtype) -> np.ndarray:
        if text in self.program.symbols:
            return np.array([self.program.symbols[text]]).astype(dtype)
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
            return np.array([int(text[2:], 16)], np.uint32).view(dtype)
        if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", text):
            return np.array([int(text[2:], 16)], np.uint64).view(dtype)
        try:
            value = int(text.rstrip("U"), 0)
        except ValueError:
            raise Unsupported(f"operand {text!r} is not supported") from None
        if kind == "pred":
            return np.array([value != 0])
        width = np.dtype(dtype).itemsize * 8
        return np.array([value & ((1 << width) - 1)], UNSIGNED[width]).view(dtype)

    def write(self, operand: Operand, kind: str) -> Write:
        """Function that stores an array with the dtype of `kind` in a register; "_" discards it."""
        if operand == "_":
            return lambda batch, mask, value: None
        if not isinstance(operand, Register):
            raise Unsupported("expected a register as destination")
        self.effects.writes.append(operand.index)
        index, width = operand.index, operand.width
        if (kind == "pred") != (width == 1):
            raise Unsupported("a predicate and a number cannot be mixed")
        given = 1 if width == 1 else 8 * np.dtype(DTYPES[PACKED.get(kind, kind)]).itemsize
        if given > width:
            raise Unsupported(f"a {width}-bit register cannot hold .{kind}")
        stored = np.bool_ if width == 1 else UNSIGNED[width]
        of_width = SIGNED if kind[0] == "s" else UNSIGNED

        def write(batch, mask, value):
            if given < width:
                value = value.view(of_width[given]).astype(of_width[width])
            value, registers = value.view(stored), batch.registers
            if mask is not None:
                held = registers[index]
                value = np.where(mask, value, held)
                if not isinstance(held, np.ndarray):  # in flight for other threads
                    value = held.holding(value)
            registers[index] = value

        return write

    def address(self, operand: Operand) -> Read:
        """Function that computes the byte address of each thread, uint64."""
        if not isinstance(operand, Address):
            raise Unsupported("expected an address")
        symbols: dict[Any, int] = self.program.symbols
        offset = np.uint64(operand.offset + symbols.get(operand.base, 0) & 2**64 - 1)
        if isinstance(operand.base, Register):
            base = self.read(operand.base, f"u{operand.base.width}")
            self.effects.addresses.append(self.effects.reads.pop())
            return lambda batch: batch.full(base(batch).astype(np.uint64) + offset)
        if operand.base is not None and operand.base not in symbols:
            raise Unsupported(f"symbol {operand.base!r} is not defined")
        return lambda batch: np.full(batch.num_threads, offset, np.uint64)


SPECIAL_REGISTERS = frozenset(
    f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"
) | {"%laneid", "%warpid"}

_TRANSLATORS: dict[str, Callable[[Translation], Step]] = {}


def instruction(*names: str):
    """Register a translator, `(Translation) -> step`, for opcodes that begin with a name."""

    def register(translate):
        for name in names:
            _TRANSLATORS[name] = translate
        return translate

    return register


def elementwise(translation: Translation, compute, kind, result: str | None = None) -> Step:
    """Step that computes the first operand elementwise from the sources. kind: one type for all
    sources, or a type for each."""
    target, *sources = translation.operands
    kinds = [kind] * len(sources) if isinstance(kind, str) else kind
    reads = [translation.read(*pair) for pair in zip(sources, kinds, strict=True)]
    write = translation.write(target, result or kinds[0])
    return lambda batch, mask: write(batch, mask, compute(*[read(batch) for read in reads]))


def translate(program: Program, one: Instruction) -> tuple[Step, Effects]:
    """An instruction's step and the registers it uses. Raises UnknownInstruction."""
    translator = _TRANSLATORS.get(one.parts[0])
    if translator is None:
        raise UnknownInstruction(program.name, one.text, one.location)
    if why := refusal(one.opcode, program.target):
        raise UnknownInstruction(program.name, one.text, one.location, why)
    translation = Translation(program, one)
    try:
        step = translator(translation)
    except (Unsupported, KeyError, ValueError) as error:
        why = str(error) if isinstance(error, Unsupported) else f"{error!r} is not supported"
        raise UnknownInstruction(program.name, one.text, one.location, why) from None
    if "aligned" in one.parts:
        unchecked = step

        def step(batch, mask):
            batch.whole_warps(mask)
            return unchecked(batch, mask)

    if one.predicate is None:
        return step, translation.effects
    register, negated = one.predicate

    def guarded(batch, mask):
        taken, here = batch.registers[register.index], batch.every(mask)
        taken = (~taken if negated else taken) & here
        if not taken.any():
            return None
        return step(batch, mask if (taken == here).all() else taken)

    return guarded, translation.effects
