"""The command line: `nva run` answers prompts, `nva chat` holds a conversation, `nva models` lists
what can be run. `python -m nva` is the same.

The one law: a flag is a field of SamplingParams or Options and is passed on only if it was typed,
so that defaults and checks live with those records. Answers go to stdout, everything else to
stderr. Read next: terminal.py for what is shown and typed; run.py, which does the work."""

from __future__ import annotations

import argparse
import json
import sys
import time
import typing
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from nva import __version__
from nva.cli.doctor import main as diagnose
from nva.cli.terminal import ctrl_c, print_answers, say, show, speed, typed_lines
from nva.loading.options import Options
from nva.state.policy import Policy
from nva.state.request import DEFAULTS, SamplingParams
from nva.text.prompts import Prompt

if TYPE_CHECKING:  # what imports torch is imported by the command that needs it
    from nva.engine import Engine

SAMPLING = {
    "max_tokens": "tokens of the answer at most",
    "temperature": "0 always takes the likeliest token, higher is more varied",
    "top_k": "draw from this many likeliest tokens, 0 for all",
    "top_p": "draw from the likeliest tokens that together have this probability",
    "min_p": "draw from tokens at least this fraction as likely as the likeliest",
    "repetition_penalty": "above 1, avoid tokens of the prompt and the answer",
    "presence_penalty": "above 0, avoid tokens of the answer",
    "frequency_penalty": "above 0, avoid tokens of the answer the more often they occur",
    "stop": "end the answer before this text; may be given again",
    "stop_token_ids": "end the answer at this token; may be given again",
    "min_tokens": "don't end the answer before this many tokens",
    "ignore_eos": "don't end where the model would",
    "logit_bias": "add to the logit of this token; may be given again",
    "priority": "with --policy priority: lower goes first",
    "n": "answers to each prompt",
    "logprobs": (
        "with --json: log-probabilities of this many likeliest tokens at each position of the "
        "answer"
    ),
    "prompt_logprobs": "with --json: the same for the prompt",
}
LOADING = {
    "dtype": "float32, bfloat16, float16, or auto for the checkpoint's own",
    "device": "cpu, cuda, cuda:1, npu, ..., or auto for the best one here",
    "max_model_len": "tokens of prompt and answer together, by default what the model allows",
    "max_rows": "answers that are computed at once",
    "max_batched_tokens": "tokens computed in one step at most",
    "block_size": "tokens that a block of the cache holds",
    "n_blocks": "blocks of the cache",
    "cache_memory": 'or the memory for them, such as "4GiB"',
    "prefix_caching": "compute each prompt anew, also where it begins like another",
    "enforce_eager": "never compile",
    "graph": "how an NPU runs the forward: auto, eager, ge or aclgraph",
    "policy": "who goes first",
    "seed": "another seed gives other answers, unless --temperature is 0",
}
JSON_ONLY = ("logprobs", "prompt_logprobs")
RUN_ONLY = ("n", "priority", *JSON_ONLY)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 2 for bad input, which is said in one line, 130
    after Ctrl-C."""
    top = parser()
    args = vars(top.parse_args(argv))
    command = args.pop("command", None)
    if command is None:
        top.print_help(sys.stderr)
        return 2
    try:
        return command(args) or 0
    except (ValueError, OSError, MemoryError) as error:
        say(f"nva: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The commands and their flags."""
    top = argparse.ArgumentParser(
        prog="nva", description="Answer prompts with a large language model."
    )
    top.add_argument("--version", action="version", version=f"nva {__version__}")
    commands = top.add_subparsers(title="commands", metavar="run | chat | bench | models | doctor")
    run = commands.add_parser(
        "run", help="answer one or more prompts, computed together", allow_abbrev=False
    )
    run.usage = 'nva run [options] "PROMPT" ...'
    run.add_argument("prompts", nargs="*", metavar="PROMPT", help="a question, in quotes")
    run.add_argument(
        "--file", metavar="PATH", help="more prompts, one per line; - reads them from stdin"
    )
    run.add_argument(
        "--image", metavar="PATH", action="append", help="an image to ask about; may be given again"
    )
    form = run.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt as a question: the default for a chat model",
    )
    form.add_argument(
        "--raw", action="store_true", help="let the model continue the prompt as it stands"
    )
    run.add_argument(
        "--json",
        action="store_true",
        help="print a line of JSON per prompt, with token ids and more",
    )
    run.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    add_common(run, run_command, SAMPLING)
    chat = commands.add_parser("chat", help="talk with a model", allow_abbrev=False)
    chat.usage = "nva chat [options]"
    add_common(
        chat, chat_command, {name: text for name, text in SAMPLING.items() if name not in RUN_ONLY}
    )
    bench = commands.add_parser("bench", help="measure how fast a model is served here")
    bench.add_argument(
        "--model", help="checkpoint, hub id, or qwen3-0.6b-shape (by default as for run)"
    )
    bench.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16 (bfloat16)")
    bench.add_argument("--n", type=int, default=16, help="requests that are served together (16)")
    bench.set_defaults(command=bench_command)
    models = commands.add_parser(
        "models", help="list the model families, and how each was verified"
    )
    models.set_defaults(command=models_command)
    doctor = commands.add_parser(
        "doctor", help="say what this machine can run, and what is wrong with it"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=lambda args: diagnose(args["json"]))
    return top


def add_common(
    command: argparse.ArgumentParser, function: Any, sampling: Mapping[str, str]
) -> None:
    """What a command runs, and the flags that both have."""
    command.description = (function.__doc__ or "").partition("\n")[0]
    command.set_defaults(command=function)
    command.add_argument(
        "--model", help="checkpoint folder or hub id (by default $NVA_MODEL, else the demo model)"
    )
    command.add_argument(
        "--system", metavar="TEXT", help="a first message that tells a chat model how to behave"
    )
    command.add_argument(
        "--template-option",
        metavar="NAME=VALUE",
        action="append",
        help=(
            "set a variable of the chat template, such as enable_thinking=false; may be given again"
        ),
    )
    given = "what is not given is the checkpoint's generation_config, else as in parentheses"
    add_flags(command.add_argument_group("how to answer", given), SamplingParams, sampling)
    add_flags(command.add_argument_group("how to load the model"), Options, LOADING)


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
    Policy: {"metavar": "NAME"},
    tuple[str, ...]: {"action": "append", "metavar": "TEXT"},
    tuple[int, ...]: {"action": "append", "type": number, "metavar": "ID"},
    dict[int, float]: {"action": "append", "type": bias, "metavar": "ID=BIAS"},
}
"""How argparse reads a field of this type; those not here are numbers."""


def open_engine(args: Mapping[str, Any]) -> tuple[Engine, SamplingParams]:
    """The engine and the parameters that the typed flags ask for; the parameters are checked before
    anything loads."""
    params = SamplingParams(**{name: args[name] for name in SAMPLING if name in args})
    from nva.loading.load import load  # after the check, which needs no torch

    return load(args["model"], **{name: args[name] for name in LOADING if name in args}), params


def run_command(args: Mapping[str, Any]) -> None:
    """Answer one or more prompts, computed together, printed in order."""
    texts = read_prompts(args["prompts"], args["file"])
    unseen = [name for name in JSON_ONLY if name in args and not args["json"]]
    if unseen:
        raise ValueError(f"{' and '.join(unseen)} can be seen with --json only; add --json")
    options = template_options(args)
    engine, params = open_engine(args)
    from nva.run import completions

    is_chat = args["chat"] or (not args["raw"] and has_chat_template(engine))
    prompts = [
        as_prompt(text, args["system"], is_chat, args["image"] or (), options) for text in texts
    ]
    start = time.perf_counter()
    n_tokens = print_answers(
        texts, completions(engine, prompts, params, progress=not args["quiet"]), args["json"]
    )
    if not args["quiet"]:
        say(speed(n_tokens, time.perf_counter() - start))


def bench_command(args: Mapping[str, Any]) -> None:
    """Measure how fast a model is served here."""
    from nva.bench import quick

    quick(**args)


def read_prompts(prompts: Sequence[str], file: str | None) -> list[str]:
    """The prompts typed, then those of the file: its lines that are not blank. Only a newline ends
    a line, as form feeds and such may be part of a prompt."""
    text = (
        ""
        if file is None
        else sys.stdin.read()
        if file == "-"
        else Path(file).read_text(encoding="utf-8")
    )
    found = [*prompts, *(line for line in text.split("\n") if line.strip())]
    if not found:
        raise ValueError(
            'there is no prompt; give some, as in: nva run "What is the capital of France?"'
        )
    return found


def has_chat_template(engine: Engine) -> bool:
    """Whether the checkpoint says how a conversation is written."""
    return engine.tokenizer is not None and bool(engine.tokenizer.chat_template)


def as_prompt(
    text: str, system: str | None, is_chat: bool, images: Sequence[str], options: Mapping[str, Any]
) -> Prompt:
    """A question to a chat model, perhaps about images, or text to continue."""
    if is_chat:
        shown = [{"type": "image", "image": path} for path in images]
        content = [*shown, {"type": "text", "text": text}] if shown else text
        return {"messages": [*opening(system), {"role": "user", "content": content}], **options}
    chat_only = {"--system": system is not None, "--image": images, "--template-option": options}
    for flag in [name for name, given in chat_only.items() if given]:
        raise ValueError(
            f"{flag} needs a chat template, which --raw and some checkpoints do without; leave it "
            "out"
        )
    return text


def opening(system: str | None) -> list[dict[str, str]]:
    """What a conversation begins with."""
    return [] if system is None else [message("system", system)]


def message(role: str, content: str) -> dict[str, str]:
    """One turn of a conversation."""
    return {"role": role, "content": content}


def chat_command(args: Mapping[str, Any]) -> None:
    """Talk with a model: it is asked with all that was said before, which the prefix cache still
    holds."""
    options = template_options(args)
    engine, params = open_engine(args)
    with suppress(ImportError):  # where there is none, lines are typed without editing and history
        import readline  # noqa: F401 - input() uses it once it is there
    say(
        "Ask away. /reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C cuts an answer "
        "short."
    )
    said = opening(args["system"])
    for line in typed_lines():
        if line == "/reset":
            said = opening(args["system"])
        elif line.startswith("/"):
            say(f"there is no command {line}; known are /reset and /exit")
        else:
            said = answer(engine, said, line, params, options)


def models_command(args: Mapping[str, Any]) -> None:
    """List the architectures that a config.json may name, and what the tests show of each."""
    from nva.models.registry import FAMILIES, VERIFIED

    width = max(len(name) for name in FAMILIES)
    for name in sorted(FAMILIES):
        print(f"{name:<{width}}  {'; '.join(VERIFIED[name]) or 'not verified here'}")


def answer(
    engine: Engine,
    said: list[dict[str, str]],
    line: str,
    params: SamplingParams,
    options: Mapping[str, Any],
) -> list[dict[str, str]]:
    """Answer a line, showing the text as it comes, and return the conversation with both.

    A line that can't be answered is reported and forgotten; an answer cut short stays as far as it
    was shown."""
    from nva.run import stream

    asked = [*said, message("user", line)]
    try:
        with (
            ctrl_c() as pressed,
            closing(stream(engine, {"messages": asked, **options}, params)) as events,
        ):
            text = show(events, pressed, engine.state.limits.max_model_len)
    except ValueError as error:
        say(
            f"nva: {error}"
            + ("; what was said before counts too, and /reset forgets it" if said else "")
        )
        return said
    return [*asked, message("assistant", text)]
