"""Draw what the benchmarks wrote with --json: a line where the first column is a number, else bars.

    python -m bench.plot FIGURES.json [COLUMN ...] [--out figure.png]

Needs matplotlib: `pip install 'nva[bench]'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("figures", type=Path)
    options.add_argument("columns", nargs="*", help="by default the last")
    options.add_argument("--out", type=Path, default=Path("figure.png"))
    args = options.parse_args()
    found = json.loads(args.figures.read_text())
    rows = found["rows"]
    first, *rest = rows[0]
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained")
    for column in args.columns or rest[-1:]:
        x, y = [row[first] for row in rows], [row[column] for row in rows]
        if isinstance(x[0], (int, float)) and not isinstance(x[0], bool):
            axes.plot(x, y, marker="o", label=column)
        else:
            axes.barh([str(each) for each in x], y, label=column)
    axes.set(title=found["title"], xlabel=first)
    axes.legend()
    figure.savefig(args.out)
    print(args.out)


if __name__ == "__main__":
    main()
