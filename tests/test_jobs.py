"""Batch jobs: prompts from a file, answers into a file, whatever interrupts them in between."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nva.cli import main as cli
from nva.cli.jobs import answered_ids, jobs_of_lines, read_lines
from tests.test_run import folder  # noqa: F401 - the tiny model, a fixture

SMALL = "--dtype float32 --max-model-len 128 --max-rows 8 --n-blocks 128 --temperature 0"


def run(model: Path, *args: object) -> int:
    return cli.main(["run", "--model", str(model), *SMALL.split(), "--quiet", *map(str, args)])


def written(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def found(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_is_answered_as_it_asks(folder, tmp_path):  # noqa: F811
    job = [
        {"id": "text", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True},
        {"id": 7, "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, "n": 2, "seed": 1},
        {"prompt": "again", "max_tokens": 1, "logprobs": 1},
    ]
    source, output = written(tmp_path / "job.jsonl", job), tmp_path / "out.jsonl"
    assert run(folder, "--file", source, "--output", output, "--raw") == 0
    by_id = {record["id"]: record for record in found(output)}
    assert set(by_id) == {"text", 7, 2}
    assert by_id["text"]["prompt"] == "Hello"
    assert len(by_id["text"]["samples"][0]["token_ids"]) == 3
    assert by_id[7]["prompt_token_ids"] == [5, 6, 7]
    assert [len(sample["token_ids"]) for sample in by_id[7]["samples"]] == [2, 2]
    assert len(by_id[2]["samples"][0]["logprobs"]) == 1


def test_what_is_typed_holds_where_a_line_says_nothing(folder, tmp_path):  # noqa: F811
    source = written(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "x", "max_tokens": 2}])
    output = tmp_path / "out.jsonl"
    flags = ["--raw", "--max-tokens", 4, "--ignore-eos"]
    assert run(folder, "--file", source, "--output", output, *flags) == 0
    lengths = {r["id"]: len(r["samples"][0]["token_ids"]) for r in found(output)}
    assert lengths == {0: 4, 1: 2}


def test_messages_and_system(folder, tmp_path):  # noqa: F811
    """The flag's system message goes before conversations that have none."""
    user = {"role": "user", "content": "Hi"}
    own = {"role": "system", "content": "Be brief."}
    job = [{"messages": [user]}, {"messages": [own, user]}]
    source, output = written(tmp_path / "a.jsonl", job), tmp_path / "out.jsonl"
    flags = ["--system", "Be brief.", "--max-tokens", 1]
    assert run(folder, "--file", source, "--output", output, *flags) == 0
    first, second = sorted(found(output), key=lambda record: record["id"])
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    assert first["messages"] == [user]


def test_a_prompt_that_can_not_be_served_harms_no_other(folder, tmp_path, capsys):  # noqa: F811
    job = [{"prompt": "a"}, {"prompt": "long " * 500}, {"prompt": ""}, {"prompt": "b"}]
    source, output = written(tmp_path / "a.jsonl", job), tmp_path / "out.jsonl"
    assert run(folder, "--file", source, "--output", output, "--max-tokens", 2, "--raw") == 1
    by_id = {record["id"]: record for record in found(output)}
    assert "at most" in by_id[1]["error"]
    assert "empty" in by_id[2]["error"]
    assert "samples" in by_id[0] and "samples" in by_id[3]
    assert run(folder, "--file", source, "--output", output, "--resume") == 0, "all are there"
    assert len(found(output)) == 4


def test_plain_text_into_a_file(folder, tmp_path):  # noqa: F811
    source, output = tmp_path / "a.txt", tmp_path / "out.jsonl"
    source.write_text("\ufeffone\ntwo\n", encoding="utf-8")
    assert run(folder, "--file", source, "--output", output, "--raw", "--max-tokens", 1) == 0
    assert {record["prompt"] for record in found(output)} == {"one", "two"}


BAD_LINES = {
    '{"prompt": "x", "max_tokns": 3}': "prompt 1 of the file: a prompt has no 'max_tokns'; did",
    '{"prompt": "x", "max_new_tokens": 3}': "did you mean max_tokens?",
    '{"prompt": "x", "temperature": -1}': "prompt 1 of the file: temperature is -1",
    '{"id": "a"}': 'give either "prompt"',
    '{"prompt": "x", "messages": []}': 'give either "prompt"',
    '{"prompt": "x", "tools": []}': 'tools goes with "messages"',
    '{"id": 1.5, "prompt": "x"}': "its id is 1.5",
    '{"id": true, "prompt": "x"}': "its id is True",
    '["x"]': "give an object",
    '{"prompt": "x"': "prompt 1 of the file: Expecting",
    '{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}': "the id 'a' is another's",
}


@pytest.mark.parametrize("lines", BAD_LINES)
def test_a_bad_line_is_named_before_anything_loads(lines, tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text(lines)
    assert cli.main(["run", "--model", "/no/such", "--file", str(source), "--output", "o"]) == 2
    assert BAD_LINES[lines] in capsys.readouterr().err
    assert not Path("o").exists()


def test_files_that_can_not_be_read_or_written(tmp_path, capsys):
    def error(*args: object) -> str:
        assert cli.main(["run", "--model", "/no/such", *map(str, args)]) == 2
        return capsys.readouterr().err

    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert "is not UTF-8 text" in error("--file", tmp_path / "latin.txt")
    assert "can't be read: Is a directory" in error("--file", tmp_path)
    source = written(tmp_path / "a.jsonl", [{"prompt": "x"}])
    taken = tmp_path / "taken.jsonl"
    taken.write_text("something else\n")
    assert "is there already; add --resume" in error("--file", source, "--output", taken)
    assert "line 1 of --output" in error("--file", source, "--output", taken, "--resume")
    assert "can't be written" in error("--file", source, "--output", tmp_path / "no" / "o.jsonl")
    assert "--resume goes on with an --output" in error("--file", source, "--resume")
    assert "not in both" in error("typed", "--file", source, "--output", tmp_path / "o.jsonl")
    assert taken.read_text() == "something else\n"


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\x0cthree\n")
    assert list(read_lines(str(path), sys.stdin)) == ["one", "two\x0cthree"]
    assert list(read_lines("-", io.StringIO("\ufeffone\n"))) == ["one"]
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n')
    assert [job.prompt for job in jobs_of_lines(read_lines(str(path), sys.stdin))] == ["x"]


def test_a_line_that_was_cut_off_is_answered_anew(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": 0, "samples": []}\n{"id": 1, "sam')
    assert answered_ids(path) == {0}
    assert path.read_text() == '{"id": 0, "samples": []}\n'


@pytest.mark.slow
def test_two_thousand_prompts_interrupted_three_times(folder, tmp_path):  # noqa: F811
    """By Ctrl-C, SIGTERM and kill -9: each prompt is answered once, and memory stays bounded."""
    job = [
        {"id": f"p{i}", "prompt": [i % 1000 + 5, i // 1000 + 5, 7], "max_tokens": 4 + i % 5}
        for i in range(2000)
    ]
    source, output = written(tmp_path / "job.jsonl", job), tmp_path / "out.jsonl"
    flags = [*SMALL.split(), "--quiet", "--ignore-eos", "--raw"]
    command = [sys.executable, "-m", "nva", "run", "--model", str(folder), *flags]
    command += ["--file", str(source), "--output", str(output), "--resume"]
    said, codes = [], []
    for number, kill in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)):
        started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while n_lines(output) < 300 * (number + 1) and started.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started.send_signal(kill)
        said.append(started.communicate(timeout=60)[1])
        codes.append(started.returncode)
    assert codes == [130, 143, -signal.SIGKILL]
    assert "remain, add --resume to go on" in said[0] and "remain" in said[1]
    assert n_lines(output) < 2000, "the last run has something to do"
    last = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300)
    assert last.returncode == 0, last.stderr
    records = found(output)
    assert sorted(record["id"] for record in records) == sorted(line["id"] for line in job)
    lengths = {record["id"]: len(record["samples"][0]["token_ids"]) for record in records}
    assert lengths == {line["id"]: line["max_tokens"] for line in job}


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_memory_is_bounded(folder, tmp_path):  # noqa: F811
    """No more prompts are read than twice the rows, whatever the file holds."""
    from nva.loading.load import load
    from nva.run import answers
    from nva.state.request import SamplingParams

    engine = load(folder, dtype="float32", max_model_len=64, n_blocks=64, max_rows=4)
    read, done = [0], 0

    def asked():
        for number in range(60):
            read[0] += 1
            yield [5 + number], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)

    for _, answer in answers(engine, asked(), 8):
        done += 1
        assert len(answer.token_ids) == 3
        assert read[0] - done <= 8
    assert done == 60


WRONG = {
    "run x --max_tokens 5": "did you mean --max-tokens?",
    "run x --max-new-tokens 5": "did you mean --max-tokens?",
    "run x --temp 0": "did you mean --temperature?",
    "run x --tempreature 0": "did you mean --temperature?",
    "run x --gpu-memory-utilization 0.5": "did you mean --cache-memory?",
    "run x --do-sample": "did you mean --temperature (0 is greedy)?",
    "chat --num-beams 3": "examples/beam_search.py",
    "bench --tokens 3": "there is no --tokens",
    "rum x": "there is no command rum; did you mean run?",
    "sing": "there is no command sing; known are run, chat",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_flag_or_command_is_told_with_a_suggestion(line, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(line.split())
    assert left.value.code == 2
    usage, message = capsys.readouterr().err.splitlines()
    assert WRONG[line] in message
    assert usage.startswith(
        f"usage: nva {line.split()[0] if line.split()[0] in 'run chat bench' else 'COMMAND'}"
    )


def test_an_ascii_terminal_shows_the_answer(folder):  # noqa: F811
    """What it has no character for is escaped."""
    command = [sys.executable, "-m", "nva", "run", "--model", str(folder), *SMALL.split()]
    command += ["--quiet", "--raw", "--max-tokens", "2", "caf\u00e9", "two"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "> caf\\xe9" in done.stdout
