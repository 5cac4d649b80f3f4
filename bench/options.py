"""The options that all benchmarks have."""

from __future__ import annotations

import argparse


def parser(doc: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--model", help="checkpoint or qwen3-0.6b-shape (by default the demo model)"
    )
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--json", help="also write the figures to this file")
    return options
