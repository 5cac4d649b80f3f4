"""A batch job: prompts from a file, answers into a file, interrupted and gone on with at will.

The law: every prompt is answered once. An answer is a whole line of the output as soon as it is
there, and what the output has is not computed again. A prompt that can't be served is a line that
says why, and harms no other.
Read next: main.py, which runs a job; run.py, `answers`, which keeps a bounded number in flight.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import attrs

from nva.state.errors import check_names
from nva.state.request import SamplingParams
from nva.text.answers import Completion
from nva.text.chat import CHAT_KEYS
from nva.text.prompts import Prompt

if TYPE_CHECKING:  # imports torch
    from nva.engine import Engine

JSON_LINES = (".jsonl", ".ndjson")
"""Names of files that hold an object of JSON in each line; all others hold a prompt in each."""

WINDOW = 2
"""Prompts in flight, in times of the rows that run at once: enough to fill each row that ends."""

_FIELDS = tuple(attrs.fields_dict(SamplingParams))
_OTHER_NAMES = {
    "custom_id": "id",
    "text": "prompt",
    "input": "prompt",
    "conversation": "messages",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}


@attrs.frozen(kw_only=True)
class Job:
    """One prompt of a batch: what it is called, what is asked, and how to answer it."""

    id: str | int
    shown: Mapping[str, Any]  # what the output repeats: {"prompt": ...} or {"messages": ...}
    prompt: Prompt
    params: Mapping[str, Any]  # the line's own fields of SamplingParams


def read_lines(file: str, stdin: TextIO) -> Iterator[str]:
    """The lines of a UTF-8 file, or of stdin for "-", that are not blank. Only a newline ends one,
    as form feeds and such may be part of a prompt; a byte order mark is no part of any.

    Raises ValueError, naming the file, if it can't be read.
    """
    try:
        with (
            nullcontext(stdin)
            if file == "-"
            else open(file, encoding="utf-8", newline="\n") as opened
        ):
            for number, line in enumerate(opened):
                line = line.removesuffix("\n").removesuffix("\r")
                text = line.removeprefix("\ufeff") if number == 0 else line
                if text.strip():
                    yield text
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--file {file} is not UTF-8 text ({error.reason} at byte {error.start}); "
            "save it as UTF-8"
        ) from error
    except OSError as error:
        raise ValueError(f"--file {file} can't be read: {error.strerror}") from error


def jobs_of_lines(lines: Iterable[str]) -> Iterator[Job]:
    """A job for each line of JSON. Raises ValueError, naming the line, for one that is not
    understood, and for an id that comes twice."""
    seen: set[str | int] = set()
    for number, line in enumerate(lines):
        try:
            job = _job(number, json.loads(line))
        except ValueError as error:
            raise ValueError(f"prompt {number + 1} of the file: {error}") from error
        if job.id in seen:
            raise ValueError(
                f"prompt {number + 1} of the file: the id {job.id!r} is another's; "
                "give each an id of its own, or none"
            )
        seen.add(job.id)
        yield job


def _job(number: int, found: Any) -> Job:
    if not isinstance(found, Mapping):
        raise ValueError(
            f'it is {found!r:.80}; give an object, such as {{"id": "a", "prompt": "Hello"}}'
        )
    check_names("a prompt", found, ("id", "prompt", *CHAT_KEYS, *_FIELDS), _OTHER_NAMES)
    if ("prompt" in found) == ("messages" in found):
        raise ValueError('give either "prompt", a text or token ids, or "messages"')
    name = found.get("id", number)
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError(f"its id is {name!r:.80}; give a text or a whole number")
    chat = {key: found[key] for key in CHAT_KEYS if key in found}
    if "prompt" in found and chat:
        raise ValueError(f'{", ".join(chat)} goes with "messages", not with "prompt"')
    params = {key: found[key] for key in _FIELDS if key in found}
    SamplingParams(**params)  # a bad value is found before anything is loaded
    shown_key = "messages" if chat else "prompt"
    return Job(
        id=name,
        shown={shown_key: found[shown_key]},
        prompt=chat or found["prompt"],
        params=params,
    )


def jobs_of_texts(texts: Iterable[str]) -> Iterator[Job]:
    """A job for each prompt of plain text, called by its number."""
    for number, text in enumerate(texts):
        yield Job(id=number, shown={"prompt": text}, prompt=text, params={})


def answered_ids(output: Path) -> set[str | int]:
    """The ids that an output file has answers to. A last line that was cut off is taken away.

    Raises ValueError if the file is not such an output.
    """
    ids: set[str | int] = set()
    n_whole = 0
    with output.open("rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                break  # whoever wrote it was killed
            try:
                ids.add(json.loads(line)["id"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"line {number + 1} of --output {output} is not an answer with an id; "
                    "name the file of the job to go on with"
                ) from error
            n_whole += len(line)
    os.truncate(output, n_whole)
    return ids


def open_output(
    output: str | None, is_resumed: bool
) -> tuple[AbstractContextManager[TextIO], set[str | int]]:
    """The file that answers are added to, stdout for None, and the ids that it has.

    Raises ValueError for one that is there already, unless the job is to be resumed.
    """
    if output is None:
        return nullcontext(sys.stdout), set()
    path = Path(output)
    try:
        if path.exists() and not is_resumed:
            raise ValueError(
                f"--output {output} is there already; add --resume to go on with it, "
                "or name another file"
            )
        ids = answered_ids(path) if path.exists() else set()
        return path.open("a", encoding="utf-8"), ids
    except OSError as error:
        raise ValueError(f"--output {output} can't be written: {error.strerror}") from error


def as_line(job: Job, answer: Completion | ValueError) -> str:
    """An answer, or why there is none, as a line of JSON."""
    if isinstance(answer, ValueError):
        found: Mapping[str, Any] = {"error": str(answer)}
    else:
        found = {name: value for name, value in attrs.asdict(answer).items() if name != "index"}
    return json.dumps({"id": job.id, **job.shown, **found}, ensure_ascii=False)


def unanswered(jobs: Iterable[Job], ids: Collection[str | int]) -> Iterator[Job]:
    """The jobs that have no answer yet."""
    return (job for job in jobs if job.id not in ids)


def is_json_lines(file: str | None) -> bool:
    """Whether each line of the file is an object of JSON, by its name."""
    return file is not None and Path(file).suffix.lower() in JSON_LINES


def read_jobs(prompts: Sequence[str], file: str | None) -> Callable[[], Iterator[Job]]:
    """A function that gives the jobs anew at each call: prompts typed, then those of the file.

    A file is read at each call, so that a long one is never in memory as a whole.
    """
    if is_json_lines(file):
        if prompts:
            raise ValueError(f"give prompts in --file {file} or on the command line, not in both")
        return lambda: jobs_of_lines(read_lines(str(file), sys.stdin))
    if file == "-":
        texts = [*prompts, *read_lines(file, sys.stdin)]
        return lambda: jobs_of_texts(texts)
    return lambda: jobs_of_texts(
        itertools.chain(prompts, () if file is None else read_lines(file, sys.stdin))
    )


@attrs.define(kw_only=True)
class Report:
    """How far a job has come."""

    n_answered: int = 0
    n_refused: int = 0
    n_tokens: int = 0
    seconds: float = 0.0


def answer_jobs(
    engine: Engine,
    jobs: Iterable[Job],
    asked: Callable[[Job], tuple[Prompt, SamplingParams]],
    write: Callable[[str], None],
    report: Report,
) -> None:
    """Answer the jobs and write a line for each, as soon as it is there. `report` is kept up to
    date, so that whoever interrupts this can say how far it came."""
    from nva.run import answers

    window = WINDOW * engine.state.limits.max_rows
    start = time.perf_counter()
    known: dict[int, Job] = {}

    def noted() -> Iterator[tuple[Prompt, SamplingParams]]:
        for number, job in enumerate(jobs):
            known[number] = job
            yield asked(job)

    with closing(answers(engine, noted(), window)) as found:
        for number, answer in found:
            write(as_line(known.pop(number), answer) + "\n")
            report.seconds = time.perf_counter() - start
            if isinstance(answer, Completion):
                report.n_answered += 1
                report.n_tokens += sum(len(sample.token_ids) for sample in answer.samples)
            else:
                report.n_refused += 1
