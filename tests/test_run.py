"""The user's calls on a tiny random model with a real tokenizer: what comes back, in what order,
what is refused."""

import importlib
import inspect
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import nva
from nva.forward import KV
from nva.loading.find import demo_folder
from nva.loading.options import LoadOptions
from nva.state.engine import check, is_busy
from nva.state.plan import Sampled
from nva.state.request import request
from nva.steps import sample as sampling
from nva.steps.schedule import schedule
from nva.steps.submit import submit
from nva.testing import toy_sample
from nva.testing.laws import snapshot

LOOP = importlib.import_module("nva.engine")
GREEDY = nva.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
SIZES = {"dtype": "float32", "n_blocks": 64, "block_size": 4, "max_model_len": 256, "max_rows": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random Llama with the demo model's vocabulary and tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_folder() / name, path / name)
    return path


@pytest.fixture(scope="module")
def loaded(folder) -> nva.Engine:
    return nva.load(folder, **SIZES)


@pytest.fixture
def engine(loaded):
    """The engine, idle before and after."""
    yield loaded
    assert not is_busy(loaded.state)
    assert loaded.state.blocks.n_free == loaded.state.limits.n_blocks
    assert list(loaded.posted) == [] and loaded.before is None
    assert len(loaded.answers.transcripts) == len(loaded.answers.unread) == 0


def hf_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_run_is_load_and_generate(folder, engine) -> None:
    prompts = ["Hello", [1, 2, 3], MESSAGES]
    answers = nva.run(prompts, GREEDY, model=folder, **SIZES)
    assert answers == nva.generate(engine, prompts, GREEDY)
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert answers[1].prompt_token_ids == (1, 2, 3)
    assert answers[1].n_prompt_tokens == 3
    assert all(len(answer.token_ids) == 12 for answer in answers)
    assert all(answer.finish_reason == "length" and answer.stopped_by is None for answer in answers)
    assert answers[0].text == engine.tokenizer.decode(
        answers[0].token_ids, skip_special_tokens=True
    )


@pytest.mark.parametrize("prompt", ["Hello", [5, 6, 7], MESSAGES])
def test_a_single_prompt_is_a_list_of_one(engine, prompt) -> None:
    nva.generate(engine, prompt, GREEDY)  # both that are compared find it in the prefix cache
    assert nva.generate(engine, prompt, GREEDY) == nva.generate(engine, [prompt], GREEDY)


def test_no_prompts_no_answers(engine) -> None:
    assert nva.generate(engine, [], GREEDY) == []


def test_messages_begin_with_one_bos(engine) -> None:
    (answer,) = nva.generate(engine, MESSAGES, GREEDY)
    text = engine.tokenizer.apply_chat_template(
        MESSAGES["messages"], add_generation_prompt=True, tokenize=False
    )
    assert engine.tokenizer.decode(answer.prompt_token_ids) == text


def test_params_are_one_for_all_or_one_each(engine) -> None:
    each = [nva.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    answers = nva.generate(engine, ["a", "b"], each)
    assert [len(answer.token_ids) for answer in answers] == [1, 5]
    with pytest.raises(
        ValueError, match="2 prompts came with 1 params; give one record, or one per prompt"
    ):
        nva.generate(engine, ["a", "b"], each[:1])


def test_samples_are_answers_of_one_prompt(engine) -> None:
    params = nva.SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    (answer,) = nva.generate(engine, "Once", params)
    assert len(answer.samples) == 3
    assert len({sample.token_ids for sample in answer.samples}) == 3
    assert answer.text == answer.samples[0].text
    (alone,) = nva.generate(
        engine, "Once", nva.SamplingParams(n=1, seed=7, max_tokens=8, ignore_eos=True)
    )
    assert alone.token_ids == answer.samples[0].token_ids


def test_a_seed_repeats_and_no_seed_varies(engine) -> None:
    seeded = nva.SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
    free = nva.SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = nva.generate(engine, ["x", "x"], seeded)
    assert first.token_ids == second.token_ids
    first, second = nva.generate(engine, ["x", "x"], free)
    assert first.token_ids != second.token_ids


def test_logprobs_are_those_of_the_model(engine, folder) -> None:
    params = nva.SamplingParams(
        temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    prompt = [10, 20, 30, 40, 50]
    (answer,) = nva.generate(engine, prompt, params)
    ids = [*prompt, *answer.token_ids]
    expected = hf_logits(folder, ids).log_softmax(-1)
    assert answer.prompt_logprobs[0] is None
    entries = [*answer.prompt_logprobs[1:], *answer.logprobs]
    assert [entry.token for entry in entries] == ids[1:]
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[position, entry.token].item(), abs=1e-4)
        assert entry.rank == 1 + int((expected[position] > expected[position, entry.token]).sum())
        top = expected[position].topk(len(entry.top))
        assert [token for token, _ in entry.top] == top.indices.tolist()
    assert [len(entry.top) for entry in entries] == [1] * 4 + [2] * 3


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prompt_has_its_logprobs_however_it_is_cut(engine, folder, chunk) -> None:
    params = nva.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    prompt = list(range(10, 17))
    (whole,) = nva.generate(engine, prompt, params)
    (cut,) = nva.run(prompt, params, model=folder, **SIZES, max_batched_tokens=chunk)
    assert [found.token for found in cut.prompt_logprobs[1:]] == prompt[1:]
    for found, expected in zip(cut.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_a_stop_token_ends_the_text_before_it(engine) -> None:
    (whole,) = nva.generate(engine, "Hello", GREEDY)
    stop_id = whole.token_ids[4]
    first = whole.token_ids.index(stop_id)
    params = nva.SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_id]
    )
    (answer,) = nva.generate(engine, "Hello", params)
    assert answer.token_ids == whole.token_ids[: first + 1]
    assert (answer.finish_reason, answer.stopped_by) == ("stop", stop_id)
    assert answer.text == engine.tokenizer.decode(whole.token_ids[:first])


def test_min_tokens_forbids_the_stop_until_then(engine) -> None:
    (whole,) = nva.generate(engine, "Hello", GREEDY)
    stop = list(set(whole.token_ids))
    params = nva.SamplingParams(
        temperature=0, max_tokens=12, min_tokens=5, ignore_eos=True, stop_token_ids=stop
    )
    (answer,) = nva.generate(engine, "Hello", params)
    assert len(answer.token_ids) > 5
    assert not set(answer.token_ids[:5]) & set(stop)


def test_a_stop_string_ends_the_text_and_never_shows(engine) -> None:
    (whole,) = nva.generate(engine, "Hello", GREEDY)
    stop = whole.text[len(whole.text) // 2 :][:3]
    params = nva.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    events = list(nva.stream(engine, "Hello", params))
    answer = events[-1]
    assert (answer.finish_reason, answer.stopped_by) == ("stop", stop)
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert "".join(event.text for event in events[:-1]) == answer.text


def test_streamed_pieces_join_to_the_answer(engine) -> None:
    params = nva.SamplingParams(n=2, seed=1, max_tokens=20)
    texts: dict[tuple[int, int], str] = {}
    ids: dict[tuple[int, int], tuple[int, ...]] = {}
    answers = []
    for event in nva.stream(engine, ["One", "Two", "Three"], params):
        if isinstance(event, nva.Completion):
            answers.append(event)
        else:
            key = (event.index, event.sample)
            texts[key] = texts.get(key, "") + event.text
            ids[key] = ids.get(key, ()) + event.token_ids
    assert sorted(answer.index for answer in answers) == [0, 1, 2]
    for answer in answers:
        for number, sample in enumerate(answer.samples):
            assert texts[answer.index, number] == sample.text
            assert ids[answer.index, number] == sample.token_ids


def test_an_abandoned_stream_returns_its_blocks(engine) -> None:
    events = nva.stream(engine, ["One", "Two"], nva.SamplingParams(max_tokens=50, ignore_eos=True))
    next(events)
    assert is_busy(engine.state)
    events.close()
    assert not is_busy(engine.state)
    del events
    unread = nva.stream(engine, "Three", GREEDY)
    assert not is_busy(engine.state)
    unread.close()


def test_two_streams_read_in_turn_answer_as_alone(engine) -> None:
    alone = [nva.generate(engine, prompt, GREEDY)[0] for prompt in ("First", "Second")]
    streams = [nva.stream(engine, prompt, GREEDY) for prompt in ("First", "Second")]
    found = [[], []]
    for _ in range(40):
        for number, stream in enumerate(streams):
            found[number] += [
                event for event in [next(stream, None)] if isinstance(event, nva.Completion)
            ]
    assert [answers[0].token_ids for answers in found] == [answer.token_ids for answer in alone]


def test_a_step_that_raises_leaves_an_engine_that_serves(engine, monkeypatch) -> None:
    expected = nva.generate(engine, "Hello", GREEDY)
    forward, calls = engine.forward, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args)

    monkeypatch.setattr(engine, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        nva.generate(engine, "Hello", GREEDY)
    assert not is_busy(engine.state)
    assert nva.generate(engine, "Hello", GREEDY)[0].token_ids == expected[0].token_ids


@pytest.mark.parametrize("last", ["forward", "sample", "commit"])
def test_an_interrupt_right_after_any_part_of_a_step_loses_nothing(
    engine, monkeypatch, last
) -> None:
    """The part has returned and its result is not stored yet: a handle renewed by the forward would
    be lost."""
    expected = nva.generate(engine, "Hello", GREEDY)
    calls = []
    part = engine.forward if last == "forward" else getattr(engine.steps, last)

    def interrupted(*args):
        result = part(*args)
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return result

    other = nva.stream(engine, "Hello", GREEDY)
    events = [next(other)]
    if last == "forward":
        monkeypatch.setattr(engine, "forward", interrupted)
    else:
        monkeypatch.setattr(engine, "steps", attrs.evolve(engine.steps, **{last: interrupted}))
    with pytest.raises(KeyboardInterrupt):
        nva.generate(engine, "Hello again", GREEDY)
    events += other  # goes on where it was
    assert events[-1].token_ids == expected[0].token_ids
    assert len(events) == 13


@contextmanager
def interrupted_at(line: int):
    """A KeyboardInterrupt at this one of the lines that a step runs, if it has so many."""
    lines: list[str] = []

    def trace(frame, event, _):
        is_step = frame.f_code is LOOP._step.__code__
        if is_step and event == "return":
            sys.settrace(None)
        if "/nva/" not in frame.f_code.co_filename or not (lines or is_step):
            return None
        lines.append(event)
        if len(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def is_cut_short(events: Iterator[object], line: int) -> bool:
    """Whether the next event is interrupted at this line of its step."""
    try:
        with interrupted_at(line):
            next(events)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("line", range(1, 2000, 117))
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(engine, line) -> None:
    params = nva.SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, min_tokens=1, stop="@"
    )
    (expected,) = nva.generate(engine, "Hello", params)
    dying, other = nva.stream(engine, "Hello again", params), nva.stream(engine, "Hello", params)
    events = [next(other)]
    assert is_cut_short(dying, line) or line > 500  # a step has more lines, but how many may change
    dying.close()
    events += other
    assert (events[-1].text, events[-1].samples) == (expected.text, expected.samples)
    assert "".join(event.text for event in events[:-1]) == expected.text
    check(engine.state)


def test_who_steps_beside_a_stream_takes_nothing_from_it(engine) -> None:
    (expected,) = nva.generate(engine, "Hello", GREEDY)
    events = nva.stream(engine, "Hello", GREEDY)
    found = [next(events)]
    for _ in range(3):
        nva.step(engine)
    found += events
    assert found[-1].text == expected.text
    assert "".join(event.text for event in found[:-1]) == expected.text
    events = nva.stream(engine, "Hello", GREEDY)
    next(events)
    while is_busy(engine.state):
        nva.step(engine)
    assert list(events)[-1].text == expected.text


def test_threads_are_answered_as_alone(engine) -> None:
    prompts = [f"Number {number}" for number in range(6)]
    alone = [nva.generate(engine, prompt, GREEDY)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: nva.generate(engine, prompt, GREEDY)[0], prompts))
    assert [answer.token_ids for answer in answers] == alone


def test_a_stream_that_the_garbage_collector_closes_within_a_step_ends(engine, monkeypatch) -> None:
    doomed, forward = nva.stream(engine, "Hello", GREEDY), engine.forward
    next(doomed)

    def collecting(*args):
        doomed.close()
        return forward(*args)

    monkeypatch.setattr(engine, "forward", collecting)
    assert len(nva.generate(engine, "Hello again", GREEDY)[0].token_ids) == 12


def test_a_step_within_a_step_is_refused(engine, monkeypatch) -> None:
    monkeypatch.setattr(engine, "forward", lambda *_: nva.step(engine))
    with pytest.raises(RuntimeError, match="within a step of the engine already"):
        nva.generate(engine, "Hello", GREEDY)


def test_a_request_submitted_by_hand_runs_beside_the_others(engine) -> None:
    (expected,) = nva.generate(engine, "Hello", GREEDY)
    engine.state = submit(
        engine.state, [request("mine", [1, 2, 3], attrs.evolve(GREEDY, max_tokens=15))]
    )
    assert nva.generate(engine, "Hello", GREEDY)[0].token_ids == expected.token_ids
    while is_busy(engine.state):
        output = nva.step(engine)
    assert [finished.request.id for finished in output.finished] == ["mine"]


def test_stop_ids_beyond_the_vocabulary_are_refused(engine) -> None:
    with pytest.raises(
        ValueError, match="request 'mine': stop_ids has token id 1000000; the vocabulary is"
    ):
        submit(engine.state, [request("mine", [1, 2, 3], GREEDY, stop_ids={10**6})])


def test_what_a_failed_step_overwrote_is_not_found_again(folder, monkeypatch) -> None:
    """The step takes blocks in which another prompt is still cached, writes to them, and raises."""
    engine = nva.load(folder, dtype="float32", n_blocks=4, block_size=4)
    first, other = list(range(10, 22)), list(range(30, 42))
    expected = nva.generate(engine, first, GREEDY)
    forward = engine.forward

    def failing(params, kv, batch):
        forward(params, KV(kv.layers, kv.generation), batch)
        raise RuntimeError("too late")

    monkeypatch.setattr(engine, "forward", failing)
    with pytest.raises(RuntimeError, match="too late"):
        nva.generate(engine, other, GREEDY)
    monkeypatch.undo()
    assert nva.generate(engine, first, GREEDY)[0].token_ids == expected[0].token_ids


def test_a_row_of_nan_logits_ends_alone(engine, monkeypatch) -> None:
    expected = nva.generate(engine, ["Good", "Fine"], GREEDY)
    forward, steps = engine.forward, []

    def spoiled(params, kv, batch):
        logits, kv = forward(params, kv, batch)
        steps.append(batch)
        if len(steps) == 4:
            logits = logits.clone()
            logits[1] = float("nan")
        return logits, kv

    monkeypatch.setattr(engine, "forward", spoiled)
    answers = nva.generate(engine, ["Good", "Bad", "Fine"], GREEDY)
    assert [answer.finish_reason for answer in answers] == ["length", "abort", "length"]
    assert [answers[0].token_ids, answers[2].token_ids] == [answer.token_ids for answer in expected]
    assert len(answers[1].token_ids) == 3


def test_where_every_token_is_banned_the_sample_ends_alone(engine) -> None:
    banned = dict.fromkeys(range(engine.state.limits.vocab_size), float("-inf"))
    answers = nva.generate(
        engine, ["Good", "Bad"], [GREEDY, attrs.evolve(GREEDY, logit_bias=banned)]
    )
    assert [(answer.finish_reason, len(answer.token_ids)) for answer in answers] == [
        ("length", 12),
        ("abort", 0),
    ]


def test_the_second_of_equal_prompts_is_cached(engine) -> None:
    prompt = list(range(100, 150))
    first = nva.generate(engine, prompt, GREEDY)[0]
    second = nva.generate(engine, prompt, GREEDY)[0]
    assert second.token_ids == first.token_ids
    assert second.n_cached_tokens == 48  # of 50: whole blocks of 4, and not the last token


BAD_PROMPTS = {
    "empty text": ("", "prompt 1: the prompt is empty"),
    "no ids": ([], "empty"),
    "beyond the vocabulary": ([1, 49152], r"token id 49152; the vocabulary is \[0, 49152\)"),
    "negative": ([1, -1], "-1"),
    "too long for the model": ([1] * 256, "the prompt has 256 tokens; at most 255 leave room"),
    "not whole": ([1, 2.5], "2.5"),
    "bytes": (b"abc", "give a str, a list of token ids"),
    "unknown key": ({"prompt": "x"}, "messages"),
    "no messages": ({"messages": []}, "messages"),
}


BAD_CALLS = {
    "no prompt": (
        (None,),
        "prompts is None; give a str, a list of token ids, or .*, or a list of these",
    ),
    "a number": ((5,), "prompts is 5; give a str"),
    "a generator": (((text for text in "ab"),), "prompts is <generator .*; give a str"),
    "a set": (({"a"},), "prompts is {'a'}; give a str"),
    "bytes": ((b"ab",), "prompts is b'ab'; give a str"),
    "a matrix": (
        (np.ones((2, 3), int),),
        r"an array of shape \(2, 3\); give list\(array\) if each row is a prompt",
    ),
    "a message": (
        ([{"role": "user", "content": "a"}],),
        'is a message; give {"messages": \\[it\\]}',
    ),
    "params as a dict": (
        ("a", {"temperature": 0}),
        r"params is {'temperature': 0}; give nva.SamplingParams\(...\)",
    ),
    "params as a number": (("a", 5), "params is 5; give nva.SamplingParams"),
    "params of dicts": (("a", [{"temperature": 0}]), "give nva.SamplingParams"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_bad_call_is_refused(engine, arguments, message) -> None:
    for answer in (nva.generate, nva.stream):
        with pytest.raises(ValueError, match=message):
            answer(engine, *arguments)


def test_arrays_of_ids_are_prompts(engine) -> None:
    rows = np.arange(6, dtype=np.int16).reshape(2, 3)
    for prompts, lengths in (
        (rows[0], [3]),
        (list(rows), [3, 3]),
        ([rows[0], "Hello", [1]], [3, 1, 1]),
    ):
        assert [
            answer.n_prompt_tokens for answer in nva.generate(engine, prompts, GREEDY)
        ] == lengths


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_queues_nothing(engine, prompt, message) -> None:
    before = snapshot(engine.state)
    with pytest.raises(ValueError, match=message):
        nva.generate(engine, ["good", prompt, "good"], GREEDY)
    assert snapshot(engine.state) == before
    assert len(nva.generate(engine, "good", GREEDY)) == 1


def test_a_prompt_beyond_the_pool_refused_and_a_long_answer_ends_there(folder) -> None:
    engine = nva.load(folder, dtype="float32", n_blocks=4, block_size=4)
    with pytest.raises(
        ValueError, match="at most 16 leave room for an answer .*4 blocks of 4 tokens"
    ):
        nva.generate(engine, [1] * 17, GREEDY)
    (answer,) = nva.generate(
        engine, [1] * 10, nva.SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    )
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 7)


def test_more_samples_than_rows_are_refused(engine) -> None:
    with pytest.raises(ValueError, match="n is 9; at most max_rows, 8, run together"):
        nva.generate(engine, "x", nva.SamplingParams(n=9))


def test_without_a_tokenizer_ids_still_work(folder, tmp_path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path / name)
    engine = nva.load(tmp_path, **SIZES)
    (answer,) = nva.generate(engine, [5, 6, 7], GREEDY)
    assert (answer.text, len(answer.token_ids)) == ("", 12)
    with pytest.raises(ValueError, match="no tokenizer"):
        nva.generate(engine, "text", GREEDY)
    with pytest.raises(ValueError, match="no tokenizer"):
        nva.generate(engine, [5], nva.SamplingParams(stop="x"))


def test_unset_parameters_take_the_generation_config(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": false, "max_new_tokens": 3, "eos_token_id": [7, 8, 49152]}'
    )
    engine = nva.load(tmp_path, **SIZES)
    assert engine.eos_ids == {2, 7, 8}
    (answer,) = nva.generate(engine, "Hello", nva.SamplingParams(ignore_eos=True))
    (greedy,) = nva.generate(engine, "Hello", GREEDY)
    assert answer.token_ids == greedy.token_ids[:3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 4}, "load.. has no 'max_num_seqs'; did you mean max_rows"),
        ({"blocksize": 4}, "did you mean block_size"),
        ({"dtype": "int8"}, "int8"),
        ({"device": "tpu"}, "tpu|device"),
        ({"policy": "random"}, "choose one of fcfs, priority, shortest"),
        ({"max_model_len": 4096}, "positions reach 256"),
        ({"n_blocks": 4, "cache_memory": "1MiB"}, "give one of them"),
        ({"cache_memory": "lots"}, "lots"),
        ({"cache_memory": 10}, "holds no block"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"prefix_caching": "yes"}, "prefix_caching"),
    ],
)
def test_bad_options_are_refused(folder, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        nva.load(folder, **options)


def test_signatures_show_the_options() -> None:
    names = [field.name for field in attrs.fields(nva.Options)]
    assert (
        list(inspect.signature(nva.Options).parameters)
        == list(LoadOptions.__annotations__)
        == names
    )
    assert list(inspect.signature(nva.load).parameters) == ["model", "kernels", "steps", *names]
    own = ["prompts", "params", "model", "kernels", "steps"]
    assert list(inspect.signature(nva.run).parameters) == [*own, *names]


def test_steps_of_ones_own_are_served(folder, engine) -> None:
    """A scheduler, a sampler that remembers, by generate and by
    stream; the other steps stay nva's."""
    seen = []

    def counted(state):
        seen.append(state)
        return schedule(state)

    def no_repeats(last, logits, draw):
        """Greedy, but never the token of the step before."""
        scores = logits[draw.logit_rows.tolist()]
        if last is not None:
            scores[:, last] = float("-inf")
        tokens = scores.argmax(-1).cpu().numpy().astype(np.int32)
        return tokens.tolist(), Sampled(tokens=tokens, is_finite=np.ones(len(tokens), np.bool_))

    sampler = nva.Sampler(init=lambda: None, step=no_repeats)
    mine = nva.load(folder, steps=nva.Steps(schedule=counted, sample=sampler), **SIZES)
    (answer,) = nva.generate(mine, "Hello", GREEDY)
    assert len(seen) == 12
    assert all(a != b for a, b in zip(answer.token_ids, answer.token_ids[1:], strict=False))
    *_, streamed = nva.stream(mine, "Hello again", GREEDY)
    assert len(seen) == 24 and len(streamed.token_ids) == 12
    (plain,) = nva.run("Hello", GREEDY, model=folder, steps=nva.Steps(schedule=counted), **SIZES)
    assert plain.token_ids == nva.generate(engine, "Hello", GREEDY)[0].token_ids
    assert len(seen) == 36


def test_the_devices_filter_serves_beside_a_scheduler_of_ones_own(folder) -> None:
    """nva's sampler gets it, whoever schedules; a sampler of one's own is as it was given."""
    mine = nva.load(folder, steps=nva.Steps(schedule=lambda state: schedule(state)), **SIZES)
    assert mine.steps.sample.func is sampling.sample
    assert mine.steps.sample.keywords.keys() == {"filter_"}
    own = nva.load(folder, steps=nva.Steps(sample=toy_sample), **SIZES)
    assert own.steps.sample is toy_sample
    with pytest.raises(ValueError, match="steps is <function .*; give nva.Steps"):
        nva.load(folder, steps=schedule)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(nva.__file__).parent / "py.typed").is_file()


def test_a_name_that_is_no_model_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        nva.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="no config.json"):
        nva.load(tmp_path)
    with pytest.raises(ValueError, match="the hub can't give"):
        nva.load("someone/a-model-that-is-not-here")


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest"])
def test_policies_order_the_answers_but_not_their_text(folder, policy, engine) -> None:
    one_row = nva.load(folder, **SIZES | {"max_rows": 1}, policy=policy)
    prompts = ["Long " * 9, "Mid " * 4, "x"]
    params = [
        nva.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, priority=p)
        for p in (2, 0, 1)
    ]
    finished = [
        e.index for e in nva.stream(one_row, prompts, params) if isinstance(e, nva.Completion)
    ]
    assert finished == {"fcfs": [0, 1, 2], "priority": [1, 2, 0], "shortest": [2, 1, 0]}[policy]
    texts = [answer.text for answer in nva.generate(one_row, prompts, params)]
    assert texts == [answer.text for answer in nva.generate(engine, prompts, params)]
