"""Draw what the benchmarks wrote with --json: a line where the first column is a number, else bars.

    python -m bench.plot FIGURES.json [COLUMN ...] [--out figure.png]

Needs matplotlib: `pip install 'nva[bench]'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("figures", type=Path)
    options.add_argument("columns", nargs="*", help="by default the last that has numbers")
    options.add_argument("--out", type=Path, default=Path("figure.png"))
    args = options.parse_args()
    found = json.loads(args.figures.read_text())
    rows = found["rows"]
    first, *rest = rows[0]
    numbers = [column for column in rest if is_number(rows[0][column])]
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained")
    for column in args.columns or numbers[-1:]:
        x, y = [row[first] for row in rows], [row[column] for row in rows]
        if is_number(x[0]):
            axes.plot(x, y, marker="o", label=column)
        else:
            axes.barh([str(each) for each in x], y, label=column)
    axes.set(title=found["title"], **{"xlabel" if is_number(rows[0][first]) else "ylabel": first})
    axes.legend()
    figure.savefig(args.out)
    print(args.out)


if __name__ == "__main__":
    main()
