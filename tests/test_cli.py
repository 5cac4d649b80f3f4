"""The command line: flags reach the records, answers stdout; mistakes end in one line; chat keeps
what was said."""

import importlib
import io
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import attrs
import pytest

from nva.cli import flags
from nva.cli import main as cli
from nva.loading import load as loading
from nva.loading.options import Options
from nva.models import registry
from nva.state.request import SamplingParams
from nva.text.answers import Completion, Sample, TextDelta

running = importlib.import_module("nva.run")  # `nva.run` is the function


def completion(index=0, texts=("Hi.",), n_cached=0, reason="stop") -> Completion:
    samples = [
        Sample(text=text, token_ids=(5, 6), finish_reason=reason, stopped_by=2, logprobs=None)
        for text in texts
    ]
    return Completion(
        index=index,
        prompt_token_ids=(1, 2, 3),
        n_cached_tokens=n_cached,
        samples=tuple(samples),
        prompt_logprobs=None,
    )


@pytest.fixture
def calls(monkeypatch):
    """An engine that writes down what it is asked, and answers "Hi."."""
    limits = SimpleNamespace(max_model_len=100)
    engine = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template="x"), state=SimpleNamespace(limits=limits)
    )
    asked = SimpleNamespace(engine=engine, loads=[], prompts=[], closed=0)

    def load(model, **options):
        asked.loads.append((model, options))
        return asked.engine

    def completions(engine, prompts, params, progress):
        asked.prompts, asked.params, asked.progress = prompts, params, progress
        return iter([completion(index, ("Hi.",) * params.n) for index in range(len(prompts))])

    def stream(engine, prompt, params):
        asked.prompts.append(prompt)
        try:
            yield TextDelta(index=0, sample=0, text="Hi", token_ids=(5,))
            yield TextDelta(index=0, sample=0, text=".", token_ids=(6,))
            yield completion(n_cached=2)
        finally:
            asked.closed += 1

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(running, "completions", completions)
    monkeypatch.setattr(running, "stream", stream)
    return asked


def test_every_field_has_a_flag():
    fields = {field.name for field in attrs.fields(SamplingParams)}
    assert set(flags.SAMPLING) | {"seed", "tag"} == fields
    assert set(flags.LOADING) == {field.name for field in attrs.fields(Options)}


FLAGS = {
    "max_tokens": (["7"], 7),
    "temperature": (["0.5"], 0.5),
    "top_k": (["-1"], 0),
    "top_p": (["0.9"], 0.9),
    "min_p": (["0.1"], 0.1),
    "repetition_penalty": (["1.1"], 1.1),
    "presence_penalty": (["-1"], -1),
    "frequency_penalty": (["2"], 2),
    "stop": (["a", "b"], ("a", "b")),
    "stop_token_ids": (["3", "4"], (3, 4)),
    "min_tokens": (["2"], 2),
    "ignore_eos": ([], True),
    "logit_bias": (["5=-1.5", "6=2"], {5: -1.5, 6: 2.0}),
    "priority": (["-1"], -1),
    "n": (["2"], 2),
    "logprobs": (["3"], 3),
    "prompt_logprobs": (["0"], 0),
}


@pytest.mark.parametrize("name", flags.SAMPLING)
def test_a_flag_reaches_sampling(calls, name):
    values, expected = FLAGS[name]
    flag = "--" + name.replace("_", "-")
    typed = [part for value in values for part in (flag, value)] or [flag]
    assert cli.main(["run", "Hello", "--json", *typed]) == 0
    assert calls.params == SamplingParams(**{name: expected})


def test_flags_reach_loading(calls):
    line = "run Hello --model M --cache-memory 4GiB --max-rows 3 --no-prefix-caching --enforce-eager --policy shortest"
    assert cli.main([*line.split(), "--seed", "9", "--dtype", "float32"]) == 0
    [(model, options)] = calls.loads
    assert model == "M"
    assert options == {
        "dtype": "float32",
        "max_rows": 3,
        "cache_memory": "4GiB",
        "prefix_caching": False,
        "enforce_eager": True,
        "policy": "shortest",
        "seed": 9,
    }


def test_what_is_not_typed_is_not_passed_on(calls):
    assert cli.main(["run", "Hello"]) == 0
    assert calls.loads == [(None, {})]
    assert calls.params == SamplingParams()


def test_a_prompt_is_a_question_where_the_model_can_chat(calls):
    question = {"messages": [{"role": "user", "content": "Hello"}]}
    cli.main(["run", "Hello"])
    assert calls.prompts == [question]
    cli.main(["run", "Hello", "--system", "Be brief."])
    assert calls.prompts == [
        {"messages": [{"role": "system", "content": "Be brief."}, *question["messages"]]}
    ]
    cli.main(["run", "Hello", "--raw"])
    assert calls.prompts == ["Hello"]
    calls.engine.tokenizer = None
    cli.main(["run", "Hello"])
    assert calls.prompts == ["Hello"]
    cli.main(["run", "Hello", "--chat"])
    assert calls.prompts == [question]


def test_template_options_go_with_the_messages(calls, monkeypatch):
    typed = ["a=false", "b=True", "c=3", "d=x=y", 'e=["f"]']
    flags = [part for option in typed for part in ("--template-option", option)]
    options = {"a": False, "b": True, "c": 3, "d": "x=y", "e": ["f"]}
    assert cli.main(["run", "Hello", *flags]) == 0
    assert calls.prompts == [
        {"messages": [{"role": "user", "content": "Hello"}], "template_options": options}
    ]
    type_lines(monkeypatch, "one", "two")
    calls.prompts = []
    assert cli.main(["chat", *flags]) == 0
    assert [prompt["template_options"] for prompt in calls.prompts] == [options, options]


def test_prompts_come_from_a_file_too(calls, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("two\n\nthrée\n", encoding="utf-8")
    assert cli.main(["run", "one", "--raw", "--file", str(tmp_path / "prompts.txt")]) == 0
    assert calls.prompts == ["one", "two", "thrée"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("four\n"))
    assert cli.main(["run", "--raw", "--file", "-"]) == 0
    assert calls.prompts == ["four"]


def test_only_a_newline_ends_a_prompt_of_a_file(calls, tmp_path):
    (tmp_path / "prompts.txt").write_bytes("The sky is\x0cblue\r\nOne\u2028two\x1c\x85\n".encode())
    assert cli.main(["run", "--raw", "--file", str(tmp_path / "prompts.txt")]) == 0
    assert calls.prompts == ["The sky is\x0cblue", "One\u2028two\x1c\x85"]


def test_answers_go_to_stdout_alone(calls, capsys):
    cli.main(["run", "one"])
    out, err = capsys.readouterr()
    assert out == "Hi.\n"
    assert "[2 tokens in " in err and err.rstrip().endswith(" tokens/s]")
    cli.main(["run", "one", "two", "--quiet", "--n", "2"])
    assert capsys.readouterr() == ("> one\n[0] Hi.\n[1] Hi.\n\n> two\n[0] Hi.\n[1] Hi.\n\n", "")
    assert calls.progress is False


def test_json_is_a_line_per_prompt(calls, capsys):
    cli.main(["run", "one", "two", "--json"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], second["prompt"], second["index"]) == ("one", "two", 1)
    assert first["samples"][0] == {
        "text": "Hi.",
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "stopped_by": 2,
        "logprobs": None,
    }


MISTAKES = {
    "run": "there is no prompt",
    "run x --temperature nan": "temperature is nan; give a finite number",
    "run x --top-k many": "top_k is 'many'; give a whole number",
    "run x --logit-bias 5": "logit_bias has 5: ''",
    "run x --stop-token-ids a": "stop_token_ids is ('a',)",
    "run x --logprobs 2": "logprobs can be seen with --json only",
    "run x --file no/such/file": "--file no/such/file can't be read: No such file or directory",
    "run x --raw --system s": "--system needs a chat template",
    "run x --template-option thinking": "--template-option is 'thinking'; give NAME=VALUE",
    "run x --raw --template-option a=1": "--template-option needs a chat template",
    "chat --model no/such/folder": "there is no folder no/such/folder",
    "run x --policy fastest": "policy is 'fastest'; choose one of fcfs",
    "run x --n-blocks 4 --cache-memory 1GiB": "n_blocks and cache_memory both size the cache",
    "run x --cache-memory 4XB": "memory is '4XB'",
    "run x --cache-memory infGiB": "memory is 'infGiB'",
    "run x --device cuda:x": "device is 'cuda:x'; give cpu, cuda, npu",
    "run x --graph ge --enforce-eager": "enforce_eager never compiles",
    "run x --graph fast": "graph is 'fast'; choose one of auto",
    "run x --max-rows 1000000000000": "max_rows is 1000000000000; give a whole number in",
    "run x --device cpu --max-rows 100000000": "don't fit into memory",
    "bench --n 0": "max_rows is 0; give a whole number",
    "bench --model qwen3-0.6b-shape --dtype foo": "dtype is foo; choose one of float32",
    "bench --model qwen3-0.6b-shape --n 100000000": "don't fit into memory",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_ends_in_one_line(calls, capsys, monkeypatch, demo_model, line):
    if "--raw" not in line:
        monkeypatch.undo()  # the real load() refuses
    monkeypatch.setenv("NVA_MODEL", str(demo_model))
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nva: ") and err.count("\n") == 1
    assert MISTAKES[line] in err


UNKNOWN = ["run x --max-token 3", "run x --chat --raw", "walk", "chat --n 2", "chat --logprobs 1"]


@pytest.mark.parametrize("line", UNKNOWN)
def test_an_unknown_flag_is_refused(calls, capsys, line):
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    assert "usage: nva" in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys):
    assert cli.main([]) == 2
    assert "answer one or more prompts" in capsys.readouterr().err


def type_lines(monkeypatch, *lines):
    """Let input() give these lines, raise those that are exceptions, and then find the end."""
    typed = iter([*lines, EOFError])

    def answer(_):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)


def contents(prompt):
    return [message["content"] for message in prompt["messages"]]


def test_chat_asks_with_all_that_was_said(calls, capsys, monkeypatch):
    type_lines(monkeypatch, "one", "", "  two ", "/what", "/reset", "three", "/exit", "four")
    assert cli.main(["chat", "--system", "S"]) == 0
    assert list(map(contents, calls.prompts)) == [
        ["S", "one"],
        ["S", "one", "Hi.", "two"],
        ["S", "three"],
    ]
    assert [message["role"] for message in calls.prompts[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    out, err = capsys.readouterr()
    assert out == "Hi.\n" * 3
    assert "3 prompt tokens, 2 of them cached" in err
    assert "there is no command /what; known are /reset and /exit" in err


def test_ctrl_c_cuts_the_answer_only(calls, capsys, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    plain = running.stream

    def interrupted(engine, prompt, params):
        events = plain(engine, prompt, params)
        yield next(events)
        if len(calls.prompts) == 1:
            signal.raise_signal(signal.SIGINT)
        yield from events

    monkeypatch.setattr(running, "stream", interrupted)
    type_lines(monkeypatch, "one", KeyboardInterrupt, "two")
    assert cli.main(["chat"]) == 0
    assert contents(calls.prompts[1]) == ["one", "Hi.", "two"]
    assert "cut short" in capsys.readouterr().err
    assert calls.closed == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_question_that_fails_is_forgotten(calls, capsys, monkeypatch):
    plain = running.stream

    def refusing(engine, prompt, params):
        if "too long" in contents(prompt):
            raise ValueError("the prompt is too long")
        return plain(engine, prompt, params)

    monkeypatch.setattr(running, "stream", refusing)
    type_lines(monkeypatch, "too long", "two")
    assert cli.main(["chat"]) == 0
    assert contents(calls.prompts[0]) == ["two"]
    assert "nva: the prompt is too long" in capsys.readouterr().err


def test_ctrl_c_ends_a_run_quietly(calls, monkeypatch):
    monkeypatch.setattr(
        running, "completions", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert cli.main(["run", "x"]) == 130


@pytest.mark.parametrize("form", [["--raw"], ["--json"]])
def test_answers_are_printed_in_order_as_they_come_and_kept_at_an_interrupt(
    calls, capsys, monkeypatch, form
):
    seen = []

    def completions(*_, **__):
        for index in (1, 0, 3):
            yield completion(index, (f"Answer {index}",))
            seen.append(capsys.readouterr().out.count("Answer"))
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "completions", completions)
    assert cli.main(["run", "a", "b", "c", "d", "--quiet", *form]) == 130
    assert seen == [0, 2, 0]
    assert capsys.readouterr().out.count("Answer 3") == 1


def test_images_come_before_the_question(calls):
    assert cli.main(["run", "What is this?", "--image", "a.png", "--image", "b.png"]) == 0
    shown = [{"type": "image", "image": path} for path in ("a.png", "b.png")]
    question = {"type": "text", "text": "What is this?"}
    assert calls.prompts == [{"messages": [{"role": "user", "content": [*shown, question]}]}]


def test_images_need_a_chat_template(calls, capsys):
    assert cli.main(["run", "x", "--raw", "--image", "a.png"]) == 2
    assert "--image needs a chat template" in capsys.readouterr().err


def test_models_lists_every_family_and_how_it_is_verified(capsys, monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "MyForCausalLM", None)
    monkeypatch.setitem(registry.VERIFIED, "MyForCausalLM", ())
    assert cli.main(["models"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    listed = {name: claims.strip() for name, claims in lines.items()}
    assert listed.keys() == registry.FAMILIES.keys()
    assert listed["MyForCausalLM"] == "not verified here"
    assert listed["LlamaForCausalLM"].startswith(
        "logits equal to transformers'; real text of SmolLM2 135M"
    )


def test_python_m_nva_is_the_same():
    shown = subprocess.run(
        [sys.executable, "-m", "nva", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("nva ")


SMALL = ["--temperature", "0", "--max-tokens", "16", "--dtype", "float32", "--n-blocks", "64"]


def test_the_demo_model_answers(demo_model, capsys):
    question = "What is the capital of France? Answer briefly."
    assert cli.main(["run", question, "What is 2 + 3?", "--model", str(demo_model), *SMALL]) == 0
    out, err = capsys.readouterr()
    assert (
        out == f"> {question}\nThe capital of France is Paris.\n\n> What is 2 + 3?\n2 + 3 = 5\n\n"
    )
    assert "2/2" in err and "tokens/s]" in err


def test_the_demo_model_talks_and_its_prefix_cache_works(demo_model, capsys, monkeypatch):
    type_lines(monkeypatch, "What is the capital of France? Answer briefly.", "And of Italy?")
    assert cli.main(["chat", "--model", str(demo_model), *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The capital of France is Paris.\n")
    first, second = [line for line in err.splitlines() if "of them cached" in line]
    assert "40 prompt tokens, 0 of them cached" in first
    assert "32 of them cached" in second  # of 40 asked and 7 answered, two whole blocks of 16


def test_a_conversation_that_is_full_says_how_to_go_on(demo_model, capsys, monkeypatch):
    """The first answer fills the model; what follows is refused until /reset, and then answered."""
    question = "What is the capital of France? Answer briefly."
    type_lines(monkeypatch, "Count from one to a hundred.", question, "/reset", question)
    sizes = [
        "--max-model-len",
        "64",
        "--max-tokens",
        "64",
        "--temperature",
        "0",
        "--dtype",
        "float32",
    ]
    assert cli.main(["chat", "--model", str(demo_model), *sizes]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\nThe capital of France is Paris.\n\n")
    assert err.count("ended by max_model_len; /reset makes room") == 1
    (refusal,) = [line for line in err.splitlines() if line.startswith("nva: ")]
    assert "leave room for an answer" in refusal
    assert refusal.endswith("what was said before counts too, and /reset forgets it")


def test_a_first_question_that_is_refused_has_nothing_to_forget(demo_model, capsys, monkeypatch):
    type_lines(monkeypatch, "word " * 80)
    assert cli.main(["chat", "--model", str(demo_model), "--max-model-len", "64"]) == 0
    err = capsys.readouterr().err
    assert "leave room for an answer" in err
    assert "forgets it" not in err
