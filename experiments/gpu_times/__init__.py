"""Published times of operations on GPUs: see README.md for source, licence and method.

``rows`` finds measured rows; ``grid`` interpolates between them:

    decode = {"gpu": "H100-SXM", "kernel": "flash_attn3", "phase": "decode", "head_dim": 128}
    rows("attention", **decode, q_heads=32, kv_heads=8, kv_dtype="bfloat16")
    times = grid("gemm_bf16", ("m", "n", "k"), gpu="A100-SXM")
    times(m=100, n=5120, k=5120)  # seconds
"""

from __future__ import annotations

import functools
import io
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

TABLES = {
    path.name.partition(".")[0]: path for path in sorted(Path(__file__).parent.glob("*.csv*"))
}
_TEXTS = {"gpu", "engine", "kernel", "phase", "kv_dtype", "backend", "model", "card"}
_TEXTS |= {"source", "case", "title", "x_label", "unit", "half", "kind"}
_MAY_BE_0 = {"x", "host_ms", "output_tokens", "tokens"}


@functools.cache
def read(path: Path) -> pd.DataFrame:
    """The table at ``path``.  Its values are texts and positive numbers.

    Raises ValueError, with the file and the line if known, for a damaged table.
    """
    import pandas as pd
    import zstandard

    try:
        content = path.read_bytes()
        if path.suffix == ".zst":
            content = zstandard.ZstdDecompressor().decompress(content)
        table = pd.read_csv(io.BytesIO(content), skip_blank_lines=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"{path}: is truncated or corrupt: {error}") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        line = re.search(r"line (\d+)", str(error))
        raise ValueError(f"{path}:{line[1] if line else 1}: {error}") from error
    for name in table:
        wrong, needs = table[name].isna(), "a text"
        if name not in _TEXTS:
            above, kept = ("of at least", "left") if name in _MAY_BE_0 else ("above", "neither")
            numbers = pd.to_numeric(table[name], errors="coerce")
            wrong, needs = ~numbers.between(0, np.inf, inclusive=kept), f"a number {above} 0"
        if wrong.any():
            row = int(wrong.argmax())
            given = table[name].astype(object)[row]
            raise ValueError(f"{path}:{row + 2}: {name} is {given!r}; needs {needs}")
    return table


def rows(table: str | Path, **values: Any) -> pd.DataFrame:
    """The rows with these values.  ``table`` is a name in ``TABLES`` or a file.

    Raises ValueError if no row has a value.  The message lists the existing values.
    """
    path = TABLES[table] if isinstance(table, str) else table
    found = read(path)
    for number, (name, value) in enumerate(values.items()):
        if name not in found:
            raise ValueError(f"{path}:1: no column {name}, only {', '.join(found)}")
        chosen = found[found[name] == value]
        if chosen.empty:
            before = ", ".join(f"{key}={values[key]!r}" for key in list(values)[:number])
            there = ", ".join(map(str, sorted(found[name].unique())))
            given = f" for {before}" if before else ""
            raise ValueError(f"{name}={value!r} is not in the table {table}{given}; it has {there}")
        found = chosen
    return found


@functools.cache
def grid(table: str, axes: tuple[str, ...], **values: Any) -> Grid:
    """Seconds as a function of ``axes``, from the fastest row with these values at each point."""
    found = rows(table, **values)
    what = ", ".join(map(str, (table, *values.values())))
    return Grid(what, found.groupby(list(axes))["microseconds"].min() * 1e-6)


class Grid:
    """Measured seconds as a function of parameters, interpolated on logarithmic scales.

    Below a parameter's smallest value, the time is that of the smallest value.  Above its largest
    value there is no time.  If some rows lack large values of the first parameter (large batches of
    long contexts), time is extrapolated in proportion to this parameter.
    """

    def __init__(self, what: str, seconds: pd.Series) -> None:
        import pandas as pd

        self.what = what
        index = pd.MultiIndex.from_frame(seconds.index.to_frame())
        levels = [np.unique(index.get_level_values(name)) for name in index.names]
        self.axes = dict(zip(index.names, levels, strict=True))
        everywhere = pd.MultiIndex.from_product(levels)
        logs = np.log(seconds.set_axis(index).reindex(everywhere).to_numpy())
        first = np.log(levels[0])
        columns = logs.reshape(len(first), -1)
        for column in columns.T:
            known = np.flatnonzero(~np.isnan(column))
            if len(known):
                last = known[-1]
                column[:] = np.interp(first, first[known], column[known])
                column[last:] += first[last:] - first[last]
        self._logs = columns.reshape([len(level) for level in levels])

    def __call__(self, **at: Any) -> np.ndarray:
        """Seconds at these values (numbers or arrays) of all parameters.

        Raises ValueError above the measured range and where nothing was measured nearby.
        """
        corners = []
        for name, values in self.axes.items():
            asked = np.asarray(at[name], float)
            if asked.max() > values[-1]:
                raise ValueError(
                    f"{name}={asked.max():g} was not measured: {self.what} has {name} from "
                    f"{values[0]} to {values[-1]}"
                )
            known = np.log(np.maximum(asked, values[0]))
            index = np.interp(known, np.log(values), np.arange(len(values)))
            low, high = np.floor(index).astype(int), np.ceil(index).astype(int)
            corners.append(((low, 1 - (index - low)), (high, index - low)))
        total: Any = 0.0
        for corner in itertools.product(*corners):
            weight = functools.reduce(np.multiply, (weight for _, weight in corner))
            logs = self._logs[tuple(index for index, _ in corner)]
            total = total + np.where(weight > 0, weight * logs, 0.0)
        if np.isnan(total).any():
            raise ValueError(f"{at} was not measured: {self.what} has no row near it")
        return np.exp(total)
