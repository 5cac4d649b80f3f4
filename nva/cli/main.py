"""The command line: `nva run` answers prompts, `nva chat` holds a conversation, `nva models` lists
what can be run. `python -m nva` is the same.

The one law: a flag is a field of SamplingParams or Options and is passed on only if it was typed,
so that defaults and checks live with those records. Answers go to stdout, everything else to
stderr. Read next: terminal.py for what is shown and typed; run.py, which does the work."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from nva import __version__
from nva.cli.doctor import main as diagnose
from nva.cli.flags import (
    JSON_ONLY,
    LOADING,
    OTHER_FLAGS,
    RUN_ONLY,
    SAMPLING,
    add_flags,
    template_options,
)
from nva.cli.jobs import (
    Job,
    Report,
    answer_jobs,
    is_json_lines,
    open_output,
    read_jobs,
    read_lines,
    unanswered,
)
from nva.cli.parser import Parser
from nva.cli.terminal import (
    Terminated,
    ctrl_c,
    ended_by_sigterm,
    print_answers,
    progress_bar,
    say,
    show,
    speed,
    typed_lines,
    write_any_text,
)
from nva.loading.options import Options
from nva.state.errors import DeviceError
from nva.state.request import SamplingParams
from nva.text.prompts import Prompt

if TYPE_CHECKING:  # what imports torch is imported by the command that needs it
    from nva.engine import Engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 2 for bad input, which is said in one line, 1 if
    some prompts of a job have no answer, 130 after Ctrl-C."""
    write_any_text()
    top = parser()
    args = vars(top.parse_args(argv))
    args.pop("name", None)
    command = args.pop("command", None)
    if command is None:
        top.print_help(sys.stderr)
        return 2
    try:
        return command(args) or 0
    except (ValueError, OSError, MemoryError, DeviceError) as error:
        say(f"nva: {error}")
        return 2
    except KeyboardInterrupt as interrupt:
        return 143 if isinstance(interrupt, Terminated) else 130


def parser() -> Parser:
    """The commands and their flags."""
    top = Parser(prog="nva", description="Answer prompts with a large language model.")
    top.usage = "nva COMMAND [options]; see nva --help"
    top.add_argument("--version", action="version", version=f"nva {__version__}")
    commands = top.add_subparsers(
        title="commands",
        dest="name",
        metavar="run | chat | bench | models | doctor",
        parser_class=functools.partial(Parser, other_names=OTHER_FLAGS),
    )
    add_run(commands.add_parser("run", help="answer one or more prompts, computed together"))
    chat = commands.add_parser("chat", help="talk with a model")
    chat.usage = "nva chat [options]"
    shown = {name: text for name, text in SAMPLING.items() if name not in RUN_ONLY}
    add_common(chat, chat_command, shown)
    add_bench(commands.add_parser("bench", help="measure how fast a model is served here"))
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


def add_run(run: Parser) -> None:
    """The flags of `nva run`."""
    run.usage = 'nva run [options] "PROMPT" ...'
    run.add_argument("prompts", nargs="*", metavar="PROMPT", help="a question, in quotes")
    run.add_argument(
        "--file",
        metavar="PATH",
        help=(
            "more prompts, one per line; - reads them from stdin. In a .jsonl file each line is an "
            'object: "prompt" or "messages", and if need be "id" and how to answer it'
        ),
    )
    run.add_argument(
        "--output",
        metavar="PATH",
        help="write answers to this file as they come, a line of JSON each",
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on with the --output of an earlier run: what it has is not computed again",
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


def add_bench(bench: Parser) -> None:
    """The flags of `nva bench`."""
    bench.usage = "nva bench [options]"
    bench.add_argument(
        "--model", help="checkpoint, hub id, or qwen3-0.6b-shape (by default as for run)"
    )
    bench.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16 (bfloat16)")
    bench.add_argument("--n", type=int, default=16, help="requests that are served together (16)")
    bench.set_defaults(command=bench_command)


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


def open_engine(args: Mapping[str, Any]) -> tuple[Engine, SamplingParams]:
    """The engine and the parameters that the typed flags ask for; the parameters are checked before
    anything loads."""
    params = SamplingParams(**{name: args[name] for name in SAMPLING if name in args})
    from nva.loading.load import load  # after the check, which needs no torch

    return load(args["model"], **{name: args[name] for name in LOADING if name in args}), params


def run_command(args: Mapping[str, Any]) -> int:
    """Answer one or more prompts, computed together, printed in order."""
    check_run(args)
    if args["quiet"]:
        logging.getLogger("nva").setLevel(logging.WARNING)
    if args["output"] is not None or is_json_lines(args["file"]):
        return run_job(args)
    texts = read_prompts(args["prompts"], args["file"])
    options = template_options(args)
    engine, params = open_engine(args)
    from nva.run import completions

    is_chat = wants_chat(engine, args)
    prompts = [
        as_prompt(text, args["system"], is_chat, args["image"] or (), options) for text in texts
    ]
    start = time.perf_counter()
    answers = completions(engine, prompts, params, progress=not args["quiet"])
    n_tokens = print_answers(texts, answers, args["json"])
    if not args["quiet"]:
        say(speed(n_tokens, time.perf_counter() - start))
    return 0


def check_run(args: Mapping[str, Any]) -> None:
    """Raise ValueError for flags of `nva run` that have no effect together."""
    is_job = args["output"] is not None or is_json_lines(args["file"])
    unseen = [name for name in JSON_ONLY if name in args and not (args["json"] or is_job)]
    if unseen:
        raise ValueError(f"{' and '.join(unseen)} can be seen with --json only; add --json")
    if args["resume"] and args["output"] is None:
        raise ValueError("--resume goes on with an --output; name the file of the earlier run")
    if is_json_lines(args["file"]) and args["image"]:
        raise ValueError('--image is for prompts of plain text; put images into "messages"')


def run_job(args: Mapping[str, Any]) -> int:
    """Answer the prompts of a file into another, as jobs.py says. Returns the exit code."""
    # 1. All lines are understood, or nothing is loaded.
    typed = {name: args[name] for name in SAMPLING if name in args}
    jobs = read_jobs(args["prompts"], args["file"])
    n_all = sum(1 for _ in jobs())
    if not n_all:
        raise ValueError(NO_PROMPT)
    options = template_options(args)
    output, ids = open_output(args["output"], args["resume"])
    n_left = sum(1 for _ in unanswered(jobs(), ids))

    # 2. The engine, and how each job is put to it.
    engine, _ = open_engine(args)
    is_chat = wants_chat(engine, args)

    def asked(job: Job) -> tuple[Prompt, SamplingParams]:
        prompt = job.prompt
        if isinstance(prompt, str):
            prompt = as_prompt(prompt, args["system"], is_chat, args["image"] or (), options)
        elif isinstance(prompt, Mapping):
            prompt = with_system({**options, **prompt}, args["system"])
        return prompt, SamplingParams(**{**typed, **job.params})

    # 3. Each answer is written when it is there; an interrupt says what is left.
    report = Report()
    try:
        with output, progress_bar(n_left, args["quiet"]) as advance, ended_by_sigterm():

            def write(line: str) -> None:
                output.write(line)
                output.flush()
                advance(report.n_tokens)

            answer_jobs(engine, unanswered(jobs(), ids), asked, write, report)
    finally:
        n_open = n_left - report.n_answered - report.n_refused
        if n_open or not args["quiet"]:
            say(told(report, n_open, args["output"]))
    return 1 if report.n_refused else 0


def told(report: Report, n_open: int, output: str | None) -> str:
    """What a job has come to, in a line."""
    parts = [f"{report.n_answered} prompts answered"]
    if report.n_refused:
        parts.append(f"{report.n_refused} can't be served (their lines say why)")
    if n_open:
        parts.append(f"{n_open} remain" + (", add --resume to go on" if output else ""))
    text = ", ".join(parts)
    return f"{text} {speed(report.n_tokens, report.seconds)}" if report.n_tokens else text


def bench_command(args: Mapping[str, Any]) -> None:
    """Measure how fast a model is served here."""
    from nva.bench import quick

    quick(**args)


NO_PROMPT = 'there is no prompt; give some, as in: nva run "What is the capital of France?"'


def read_prompts(prompts: Sequence[str], file: str | None) -> list[str]:
    """The prompts typed, then those of the file: its lines that are not blank."""
    found = [*prompts, *(() if file is None else read_lines(file, sys.stdin))]
    if not found:
        raise ValueError(NO_PROMPT)
    return found


def wants_chat(engine: Engine, args: Mapping[str, Any]) -> bool:
    """Whether a prompt of plain text is a question to a chat model."""
    return args["chat"] or (not args["raw"] and has_chat_template(engine))


def with_system(prompt: Mapping[str, Any], system: str | None) -> Mapping[str, Any]:
    """A conversation that begins with the system's message, unless it has one of its own."""
    messages = prompt["messages"]
    has_one = any(isinstance(each, Mapping) and each.get("role") == "system" for each in messages)
    return (
        prompt
        if system is None or has_one
        else {**prompt, "messages": [*opening(system), *messages]}
    )


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
