"""How long does the first token take in a process that has just started, with the kernels built and
the model on disk?

python -m bench.cold [--model ...] [--rounds 3]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from bench.options import parser
from bench.peers.models import model_file
from nva.bench import goal, show

LONGEST = 3.0  # seconds
PROGRAM = """
import json, sys, time
marks = [time.perf_counter()]
import nva
marks.append(time.perf_counter())
engine = nva.load(sys.argv[1], dtype=sys.argv[2])
marks.append(time.perf_counter())
params = nva.SamplingParams(temperature=0, max_tokens=4)
next(nva.stream(engine, [[504, 3575, 282, 4649, 314]], params))
marks.append(time.perf_counter())
print(json.dumps(marks), flush=True)
"""


def cold_start(model: str, dtype: str) -> dict[str, float]:
    """Seconds of each stage of a process of its own, and from its start to its first token."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, model, dtype],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        output, errors = started.communicate()
    if started.returncode:
        raise RuntimeError(f"the started process failed:\n{errors}")
    begun, imported, loaded, answered = json.loads(output)
    parts = {
        "import s": imported - begun,
        "load s": loaded - imported,
        "first token s": answered - loaded,
    }
    return {"python s": begun - start, **parts, "in all s": answered - start}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    model = str(model_file(args.model, "checkpoint"))
    cold_start(model, args.dtype)  # builds the kernels, and brings the files to memory
    fastest = min(
        (cold_start(model, args.dtype) for _ in range(args.rounds)),
        key=lambda found: found["in all s"],
    )
    row = {"model": Path(model).name, **fastest, "goal": goal(fastest["in all s"], at_most=LONGEST)}
    show("from a cold start to the first token", [row], args.json)


if __name__ == "__main__":
    main()
