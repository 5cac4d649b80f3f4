"""Where does the time of a workload go: to the model, or to the host's own work around it?

    python -m bench.parts [--model ...] [--only W1 W4]

The host plans, packs, samples, commits and turns ids to text; all of it together should take less
than a twentieth."""

from __future__ import annotations

from bench.options import parser
from bench.workloads import shifted, shortened, workloads
from nva.bench import HOST_SHARE, goal, open_model, serve, show


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", default=["W1", "W2", "W3", "W4"])
    args = options.parse_args()
    engine, found, rows = (
        open_model(args.model, args.dtype, max_rows=32, max_model_len=2304),
        workloads(args.model),
        [],
    )
    for name in args.only:
        serve(engine, shortened(shifted(found[name], 1), 8))
        report = serve(engine, found[name])
        row = {"workload": name, "seconds": report.seconds, "steps": len(report.steps)}
        row |= {f"{part} %": 100 * share for part, share in report.shares.items()}
        rows.append(
            {
                **row,
                "host share": report.host_share,
                "goal": goal(report.host_share, at_most=HOST_SHARE),
            }
        )
    show(f"where the time goes, {engine.name}", rows, args.json)


if __name__ == "__main__":
    main()
