"""The flags of the command line: one for each field of SamplingParams and Options.

The law: a flag is passed on only if it was typed, so that defaults and checks live with those
records. Read next: main.py, the commands that take them; parser.py, what is said of a wrong one.
"""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import attrs

from nva.loading.options import OTHER_NAMES as LOADING_NAMES
from nva.loading.options import Options
from nva.state.policy import Policy
from nva.state.request import DEFAULTS, SamplingParams
from nva.state.request import OTHER_NAMES as SAMPLING_NAMES

SAMPLING = {
    field.name: field.metadata["help"]
    for field in attrs.fields(SamplingParams)
    if field.name not in ("seed", "tag")  # the seed is an option of loading
}
LOADING = {field.name: field.metadata["help"] for field in attrs.fields(Options)}
JSON_ONLY = ("logprobs", "prompt_logprobs")
RUN_ONLY = ("n", "priority", *JSON_ONLY)
OTHER_FLAGS = {
    **SAMPLING_NAMES,
    **LOADING_NAMES,
    "temp": "temperature",
    "max_new": "max_tokens",
    "n_predict": "max_tokens",
    "prompt": "PROMPT, in quotes, without a flag",
    "input": "file",
    "prompts_file": "file",
    "out": "output",
    "model_path": "model",
    "max_seq_len": "max_model_len",
    "batch_size": "max_rows",
}
"""What other tools call a flag, beside what their Python names say."""


def add_flags(group: Any, record: type, texts: Mapping[str, str]) -> None:
    """A flag per field of a record, --no-... for what is on by default. One that isn't typed is not
    in the result."""
    hints = typing.get_type_hints(record)
    for name, text in texts.items():
        default = DEFAULTS.get(name, getattr(attrs.fields(record), name).default)
        flag = ("--no-" if default is True else "--") + name.replace("_", "-")
        if hints[name] is bool:
            reading: dict[str, Any] = {"action": "store_false" if default else "store_true"}
        else:
            reading = READINGS.get(hints[name], {"type": number, "metavar": "N"})
        text = f"don't {text}" if default is True else text
        text = f"with --json: {text}" if name in JSON_ONLY else text
        text += "; may be given again" if reading.get("action") == "append" else ""
        note = f" ({default})" if type(default) in (int, float, str) else ""
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=text + note, **reading)


def number(text: str) -> int | float | str:
    """The number that a text is, else the text: the record that gets it knows what it allows, and
    says so."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def bias(text: str) -> tuple[int | float | str, int | float | str]:
    """A token id and what to add to its logit."""
    token, _, added = text.partition("=")
    return number(token), number(added)


def template_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into a prompt beside its messages: the variables typed for the chat template, as
    JSON where they are.

    Raises ValueError for one that has no value.
    """
    pairs = [option.partition("=") for option in args["template_option"] or ()]
    for name, sign, _ in pairs:
        if not name or not sign:
            raise ValueError(
                f"--template-option is {name + sign!r}; give NAME=VALUE, such as "
                "enable_thinking=false"
            )
    return (
        {"template_options": {name: json_or_text(value) for name, _, value in pairs}}
        if pairs
        else {}
    )


def json_or_text(text: str) -> Any:
    """The value that a text is in JSON, or as Python prints it, else the text."""
    with suppress(ValueError):
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    return text


READINGS: dict[Any, dict[str, Any]] = {
    str: {"metavar": "NAME"},
    str | Policy: {"metavar": "NAME"},
    tuple[str, ...]: {"action": "append", "metavar": "TEXT"},
    tuple[int, ...]: {"action": "append", "type": number, "metavar": "ID"},
    dict[int, float]: {"action": "append", "type": bias, "metavar": "ID=BIAS"},
}
"""How argparse reads a field of this type; those not here are numbers."""
