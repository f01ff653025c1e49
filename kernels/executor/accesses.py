"""Loads, stores and asynchronous copies (PTX ISA 9.7.9), ldmatrix and stmatrix (9.7.14.5), atomic
instructions (9.7.13.5, 9.7.13.7).

An access must be aligned to its size, a vector access to the size of the whole vector. Cache
operators and eviction hints are accepted and ignored.

An atomic instruction takes effect thread by thread, in the order of the thread numbers. On shared
memory only barriers order accesses; acquire and release do not. A kernel with atomic instructions
on global memory runs program by program, so a lock is free when the next program asks for it. A
program that waits for a later program of the grid never ends (an ENDLESS fault).
"""

import re
from typing import Any

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.operands import (
    DTYPES,
    PACKED,
    Read,
    Step,
    Translation,
    Unsupported,
    instruction,
    is_float,
)
from kernels.executor.ptx import LOCAL_ORIGIN, Operand, Register
from kernels.executor.tma import load_box

_HINTS = re.compile(r"ca|cg|cs|lu|cv|wb|wt|nc|weak|L1::.*|L2::.*")


def _space(translation: Translation) -> str:
    """State space: "global", "shared", "local" or "param"; raises for unsupported forms."""
    spaces = ("global", "shared", "shared::cta", "local", "param")
    known = (*spaces, "v2", "v4", "v8")
    for part in translation.parts[1:-1]:
        if part not in known and not _HINTS.fullmatch(part):
            raise Unsupported(f".{part} is not supported")
    return translation.one_of(spaces).removesuffix("::cta")


def _address(translation: Translation, operand: Operand, space: str) -> Read:
    """Address of an operand in its state space. Local memory begins at 0."""
    address = translation.address(operand)
    if space != "local":
        return address
    return lambda batch: address(batch) - np.uint64(LOCAL_ORIGIN)


def registers_in(operand: Operand) -> tuple:
    """The registers of an operand: a vector, or one."""
    return operand if isinstance(operand, tuple) else (operand,)


def _vector(translation: Translation, operand: Operand) -> tuple:
    registers, vector = registers_in(operand), translation.one_of(("v2", "v4", "v8"), default="v1")
    if int(vector[1:]) != len(registers):
        raise Unsupported(f"{len(registers)} registers for .{vector}")
    return registers


@instruction("ld")
def _ld(translation: Translation) -> Step:
    space, kind = _space(translation), translation.kind
    target, source, *_hints = translation.operands
    dtype = DTYPES[PACKED.get(kind, kind)]
    if space == "param":
        name, write_one = source.base, translation.write(target, kind)
        if name not in dict(translation.program.parameters):
            raise Unsupported(f"{name!r} is no parameter")
        return lambda batch, mask: write_one(
            batch, mask, np.frombuffer(batch.launch.parameters[name], dtype, 1, source.offset)
        )
    targets, address = _vector(translation, target), _address(translation, source, space)
    writes = [translation.write(one, kind) for one in targets]
    size = np.dtype(dtype).itemsize * len(targets)
    is_constant = "nc" in translation.parts

    def load(batch, mask):
        memory = batch.memory_of(space)
        values = memory.load(batch, address(batch), mask, size, constant=is_constant).view(dtype)
        for number, write in enumerate(writes):
            write(batch, mask, np.ascontiguousarray(values[:, number]))

    return load


@instruction("st")
def _st(translation: Translation) -> Step:
    space, kind = _space(translation), translation.kind
    target, source, *_hints = translation.operands
    if space == "param":  # of a call, which is a register here
        if not isinstance(target.base, Register):
            raise Unsupported("parameters are read-only")
        read_one, write = translation.read(source, kind), translation.write(target.base, kind)
        return lambda batch, mask: write(batch, mask, read_one(batch))
    sources, address = _vector(translation, source), _address(translation, target, space)
    dtype = DTYPES[PACKED.get(kind, kind)]
    reads = [translation.read(one, kind) for one in sources]

    def store(batch, mask):
        values = np.empty((batch.num_threads, len(reads)), dtype)
        for number, read in enumerate(reads):
            values[:, number] = read(batch)
        batch.memory_of(space).store(batch, address(batch), mask, values.view(np.uint8))

    return store


@instruction("cp")
def _cp(translation: Translation) -> Step:
    opcode = translation.instruction.opcode
    if opcode == "cp.async.commit_group":
        return lambda batch, mask: batch.copies.commit(batch.every(mask))
    if opcode == "cp.async.wait_all":
        return lambda batch, mask: batch.copies.wait_all(batch.every(mask))
    if opcode == "cp.async.wait_group":
        max_pending = int(translation.operands[0], 0)
        return lambda batch, mask: batch.copies.wait(batch.every(mask), max_pending)
    if opcode.startswith("cp.async.bulk"):
        return load_box(translation)
    if not re.match(r"cp\.async\.c[ag]\.shared(::cta)?\.global(\.L2::\w+)*$", opcode):
        raise Unsupported("this form of cp is not supported")
    target, source, size, *rest = translation.operands
    to, origin, size = translation.address(target), translation.address(source), int(size, 0)
    read_size = translation.read(rest[0], "u32") if rest else None

    def copy(batch, mask):
        """Copy the first read_size bytes and fill up to `size` with zeros."""
        active, sizes = batch.every(mask), np.array([size], np.int64)
        reading = active
        if read_size is not None:
            sizes = batch.full(read_size(batch)).astype(np.int64)
            if (active & (sizes > size)).any():
                thread = int(np.flatnonzero(active & (sizes > size))[0])
                detail = f"a src-size of {sizes[thread]} with a cp-size of {size}"
                raise batch.fault(FaultKind.UNDEFINED, detail, thread)
            reading = active & (sizes > 0)
        source = origin(batch)
        data = batch.memory.load(
            batch, source, reading, size, sizes=sizes, alignment=size, copies=True
        )
        batch.copies.issue(to(batch), active, data, (source, reading, sizes))

    return copy


@instruction("ldmatrix", "stmatrix")
def _move_matrices(translation: Translation) -> Step:
    """8x8 matrices of 16-bit elements. Thread 8 i + r gives the address of row r, 16 bytes, of
    matrix i; register i of thread 4 r + c holds the elements 2 c and 2 c + 1 of row r, or with
    .trans of column r."""
    parts, counts = translation.parts, ("x1", "x2", "x4")
    translation.expect("sync", "aligned", "m8n8", *counts, "trans", "shared", "shared::cta")
    if translation.kind != "b16":
        raise Unsupported("only matrices of 16-bit elements are known")
    loads, transposed = parts[0] == "ldmatrix", "trans" in parts
    count = int(translation.one_of(counts)[1:])
    registers, source = translation.operands if loads else reversed(translation.operands)
    registers, address = registers_in(registers), translation.address(source)
    if len(registers) != count:
        raise Unsupported(f"{len(registers)} registers for .x{count}")
    access = [(translation.write if loads else translation.read)(one, "b32") for one in registers]
    order = (1, 0, 3, 2) if transposed else (1, 0, 2, 3)  # register, warp, row, column

    def move(batch, mask):
        rows = batch.every(mask)
        if count < 4:
            rows = rows & (np.arange(batch.num_threads) % 32 < 8 * count)
        if loads:
            matrices = batch.shared.load(batch, address(batch), rows, 16).view(np.uint16)
            matrices = np.ascontiguousarray(matrices.reshape(-1, 4, 8, 8).transpose(order))
            for write, one in zip(access, matrices.view(np.uint32), strict=False):
                write(batch, mask, one.reshape(-1))
        else:
            matrices = np.zeros((4, batch.num_threads), np.uint32)
            for number, read in enumerate(access):
                matrices[number] = read(batch)
            matrices = matrices.view(np.uint16).reshape(4, -1, 8, 8).transpose(order)
            data = np.ascontiguousarray(matrices).reshape(-1, 8).view(np.uint8)
            batch.shared.store(batch, address(batch), rows, data)

    return move


_ORDERS = {"relaxed": "", "acquire": "a", "release": "r", "acq_rel": "ar"}
_SCOPES = ("cta", "cluster", "gpu", "sys")
REDUCTIONS: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
REDUCTIONS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
"""Operations of atom, red and redux."""
_OPERATIONS = {**REDUCTIONS, "exch": lambda _old, new: new}


@instruction("atom", "red")
def _atomic(translation: Translation) -> Step:
    kind, returns = translation.kind, translation.parts[0] == "atom"
    name = translation.one_of((*_OPERATIONS, "cas"))
    order = _ORDERS[translation.one_of(_ORDERS, default="relaxed")]
    spaces = ("global", "shared", "shared::cta")
    translation.expect(*spaces, name, *_ORDERS, *_SCOPES)
    space = translation.one_of(spaces).removesuffix("::cta")
    if is_float(kind) and (name not in ("add", "exch") or kind in PACKED or kind == "f16"):
        raise Unsupported(f".{name} of .{kind}")
    target, changed, *operands = translation.operands if returns else ("_", *translation.operands)
    if len(operands) != 1 + (name == "cas"):
        raise Unsupported(f"{len(operands)} operands of .{name}")
    dtype = DTYPES[kind]
    write, address = translation.write(target, kind), translation.address(changed)
    reads = [translation.read(operand, kind) for operand in operands]
    is_global = space == "global"
    ordering = {"release": is_global and "r" in order, "acquire": is_global and "a" in order}
    compute = _OPERATIONS.get(name)

    def atomic(batch, mask):
        held_by = batch.memory_of(space).atomic(batch, address(batch), mask, dtype, **ordering)
        values = [batch.full(read(batch)) for read in reads]
        before = np.zeros(batch.num_threads, dtype)
        for thread, held in held_by.items():
            before[thread] = held[0]
            given = [value[thread : thread + 1] for value in values]
            if compute is not None:
                held[:] = compute(held, given[0])
            elif held[0] == given[0][0]:
                held[:] = given[1]
        write(batch, mask, before)

    return atomic
