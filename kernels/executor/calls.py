"""Calls: vprintf (`tl.device_print`) and __assertfail (`tl.device_assert`)."""

import re

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.operands import Step, Translation, Unsupported, instruction
from kernels.executor.ptx import LOCAL_ORIGIN

_FORMATTED = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(ll|l|)([diuxXfFeEgGp%])")


@instruction("call")
def _call(translation: Translation) -> Step:
    names = [one for one in translation.operands if isinstance(one, str)]
    arguments = translation.operands[translation.operands.index(names[0]) + 1 :]
    reads = [translation.read(argument, f"u{argument.width}") for argument in arguments]
    texts = {
        translation.program.symbols[name]: bytes(array).split(b"\0")[0].decode()
        for name, array in translation.program.constants.items()
    }

    def text_at(addresses, thread):
        return texts[int(addresses[min(thread, len(addresses) - 1)])]

    def fail(batch, mask):
        threads = batch.every(mask)
        message = text_at(reads[0](batch), int(np.argmax(threads)))
        batch.refuse(threads, FaultKind.TRAP, f"assertion failed: {message}")

    def print_threads(batch, mask):
        formats, values = reads[0](batch), batch.full(reads[1](batch))
        for thread in np.flatnonzero(batch.every(mask)):
            print(_formatted(batch, text_at(formats, thread), thread, values), end="")

    steps = {"__assertfail": fail, "vprintf": print_threads}
    if names[0] not in steps:
        raise Unsupported(f"function {names[0]!r} is not supported")
    return steps[names[0]]


def _formatted(batch, text: str, thread: int, places: np.ndarray) -> str:
    """Text with a thread's values inserted. They are in its local memory from `places` on, each
    aligned to its size."""
    mask = np.arange(batch.num_threads) == thread
    places = places - np.uint64(LOCAL_ORIGIN)

    def value(matched):
        nonlocal places
        flags, length, letter = matched.groups()
        if letter == "%":
            return "%"
        kind = "f" if letter in "fFeEgG" else "i" if letter in "di" else "u"
        size = np.uint64(8 if kind == "f" or length == "ll" or letter == "p" else 4)
        places = (places + size - np.uint64(1)) // size * size
        data = batch.local.load(batch, places, mask, int(size))[thread]
        places = places + size
        flags, letter = ("#" + flags, "x") if letter == "p" else (flags, letter)
        return f"%{flags}{letter}" % data.view(f"{kind}{size}")[0]

    return _FORMATTED.sub(value, text)
