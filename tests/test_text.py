"""Text in and out: prompts of every form, increments that join to the full decode, stop strings
that never leak."""

import itertools
import json
import re

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nva.text.detokenize import (
    N_KEPT,
    Detokenizer,
    detokenizer,
    finish,
    flush,
    push,
    read,
    split_at_stop,
    text_stream,
)
from nva.text.prompts import encode, load_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "a", "é", "▁日本", "語", "\ufffd", "##ing", "end</w>", "."]
METASPACE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
)
DECODERS = {
    "metaspace": METASPACE,
    "metaspace, first space stripped": decoders.Sequence([METASPACE, decoders.Strip(" ", 1, 0)]),
    "metaspace, first piece stripped": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(),
    "end of word": decoders.BPEDecoder("</w>"),
    "none": None,
}


def wrap(backend: Backend, **options) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with two special tokens and one that is added but not special."""
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool call>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options
    )


def word_tokenizer(decoder: decoders.Decoder | None) -> PreTrainedTokenizerFast:
    vocab = {piece: id_ for id_, piece in enumerate([*BYTES, *WORDS])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    if decoder is not None:
        backend.decoder = decoder
    return wrap(backend)


def as_letters(text: str) -> str:
    """Each byte of a text as the printable letter that stands for it in a byte-level vocabulary."""
    return ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte a token, some merged across the borders of characters."""
    letters = sorted(ByteLevel.alphabet())
    pieces = [as_letters(text) for text in ("the", "日本", "😀", "\ufffd")]
    parts = [pieces[1][:2], pieces[1][2:], pieces[2][:3], pieces[2][1:], pieces[2][3] + "a"]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate([*letters, *pieces, *parts])}, merges=[]
        )
    )
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


def tidy_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose plain decode would move spaces about once the text is whole."""
    vocab = {piece: i for i, piece in enumerate(["a", ".", ",", "do", "n't", " ", "?"])}
    return wrap(Backend(models.WordLevel(vocab, unk_token="a")), clean_up_tokenization_spaces=True)


TOKENIZERS = {"byte level": byte_tokenizer(), "tidy": tidy_tokenizer()}
TOKENIZERS |= {name: word_tokenizer(decoder) for name, decoder in DECODERS.items()}
any_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
fewer = settings(
    max_examples=settings.default.max_examples // 8 + 20
)  # for each of eight tokenizers


def ids_of(tokenizer, *, beyond: int = 3) -> st.SearchStrategy[list[int]]:
    """Random ids, rare pieces as likely as bytes, and some ids that the tokenizer doesn't know."""
    n = len(tokenizer)
    return st.lists(
        st.integers(0, n + beyond - 1) | st.integers(max(0, n - 30), n - 1), max_size=40
    )


def full_decode(tokenizer, ids: list[int]) -> str:
    """transformers' decode; but where its decoder makes replacements of a whole run of bytes for
    one that fits no character, only of that one."""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    if BYTES[0] in tokenizer.get_vocab() and "é" in tokenizer.decode(byte_ids(tokenizer, "é")):
        ids = [token for part in runs(tokenizer, ids) for token in valid(tokenizer, part)]
    return tokenizer.decode(ids, **options)


def runs(tokenizer, ids: list[int]) -> list[list[int]]:
    """The ids that have a text, cut where a run of byte tokens begins or ends."""
    detok = detokenizer(tokenizer)
    seen = [token for token in ids if token in detok.visible]
    return [
        list(part) for _, part in itertools.groupby(seen, key=lambda id_: id_ in byte_of(tokenizer))
    ]


def byte_of(tokenizer) -> dict[int, int]:
    return {id_: byte for byte, id_ in enumerate(tokenizer.convert_tokens_to_ids(BYTES))}


def valid(tokenizer, run: list[int]) -> list[int]:
    """A run of bytes, with those of U+FFFD for each that fits no character; any other as it is."""
    known = byte_of(tokenizer)
    if run[0] not in known:
        return run
    text = bytes(known[token] for token in run).decode("utf-8", "surrogateescape")
    data = re.sub("[\udc80-\udcff]", "\ufffd", text).encode()
    return tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in data])


def pieces_of(data: st.DataObject, items):
    """Any way to cut a list or a text into consecutive pieces, some empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=len(items))))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def check_detokenizer(tokenizer, detok: Detokenizer, ids: list[int], data: st.DataObject) -> None:
    """The law of increments, and that nothing is held back without need: no more than the bytes of
    one character, each a replacement in what is decoded so far."""
    shown, seen = "", []
    for piece in pieces_of(data, ids):
        detok, text = push(detok, piece)
        shown, seen = shown + text, seen + piece
        so_far = full_decode(tokenizer, seen)
        assert so_far.startswith(shown)
        held = so_far[len(shown) :]
        if detok.byte_of:
            trailing = runs(tokenizer, seen)[-1:] if seen else []
            n_bytes = len(trailing[0]) if trailing and trailing[0][0] in detok.byte_of else 0
            assert set(held) <= {"\ufffd"} and len(held) <= min(3, n_bytes)
        else:
            assert held in ("", "\ufffd")
    assert shown + flush(detok) == full_decode(tokenizer, ids)


@any_tokenizer
@fewer
@given(data=st.data())
def test_increments_join_to_the_full_decode(tokenizer, data):
    check_detokenizer(tokenizer, detokenizer(tokenizer), data.draw(ids_of(tokenizer)), data)


@fewer
@given(data=st.data())
def test_increments_join_to_the_full_decode_of_the_demo_model(demo_detokenizer, data):
    tokenizer, detok = demo_detokenizer
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3) | st.integers(0, 300), max_size=40))
    check_detokenizer(tokenizer, detok, ids, data)


@fewer
@given(text=st.text(), data=st.data())
def test_real_text_comes_back(demo_detokenizer, text, data):
    tokenizer, detok = demo_detokenizer
    check_detokenizer(tokenizer, detok, tokenizer.encode(text), data)


@pytest.fixture(scope="module")
def demo_detokenizer(demo_model):
    tokenizer = load_tokenizer(demo_model)
    return tokenizer, detokenizer(tokenizer)


def test_half_a_character_waits():
    tokenizer = TOKENIZERS["byte level"]
    first, second = tokenizer.convert_tokens_to_ids(list(as_letters("é")))
    detok, text = push(detokenizer(tokenizer), [first])
    assert text == ""
    assert push(detok, [second])[1] == "é"
    assert flush(detok) == "\ufffd"


def byte_ids(tokenizer, text: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in text.encode()])


def test_characters_of_a_run_of_byte_tokens_come_at_once():
    tokenizer = TOKENIZERS["metaspace"]
    detok, pieces = detokenizer(tokenizer), []
    for token in byte_ids(tokenizer, "é日😀a"):
        detok, text = push(detok, [token])
        pieces.append(text)
    assert pieces == ["", "é", "", "", "日", "", "", "", "😀", "a"]


def test_a_byte_that_is_no_character_spoils_none_before_it():
    tokenizer = TOKENIZERS["metaspace"]
    lead, wrong = byte_ids(tokenizer, "日")[0], tokenizer.convert_tokens_to_ids("<0xFF>")
    detok, text = push(detokenizer(tokenizer), byte_ids(tokenizer, "é") + [lead, wrong])
    assert text == "é\ufffd\ufffd"
    assert push(detok, tokenizer.convert_tokens_to_ids(["▁the"]))[1] == " the"
    assert flush(push(detok, [lead])[0]) == "\ufffd"


@fewer
@given(text=st.text("éa日😀 \ufffd", max_size=30), data=st.data())
def test_a_run_of_valid_bytes_is_exactly_decode(text, data):
    for name in ("metaspace", "metaspace, first space stripped"):
        tokenizer, shown = TOKENIZERS[name], ""
        detok, ids = detokenizer(tokenizer), byte_ids(tokenizer, text)
        for piece in pieces_of(data, ids):
            detok, new = push(detok, piece)
            shown += new
        assert shown + flush(detok) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_stop_string_is_seen_within_a_run_of_bytes():
    tokenizer = TOKENIZERS["metaspace"]
    stream, shown = text_stream(detokenizer(tokenizer), ["日"]), ""
    for token in byte_ids(tokenizer, "é日"):
        stream, text = read(stream, [token])
        shown += text
    assert (shown, stream.stopped_by) == ("é", "日")


SPECIAL_STOPS = [
    (["</s>"], ["a", "</s>"], "a", "</s>"),
    (["</s>", "a"], ["▁the", "</s>", "a"], " the", "</s>"),
    (["</s>", "e"], ["▁the", "</s>"], " th", "e"),  # text that completes first wins
    (["hex", "</s>"], ["▁the", "</s>"], " the", "</s>"),  # what was held is shown
    (["</s>"], ["a", "<s>", "a"], "aa", None),  # another special token has no text, as ever
    (["<tool call>"], ["a", "<tool call>"], "a", "<tool call>"),  # added, but not special
]


@pytest.mark.parametrize(("stops", "tokens", "text", "stopped_by"), SPECIAL_STOPS)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_stop_string_may_be_a_special_token(stops, tokens, text, stopped_by, at_once):
    tokenizer = TOKENIZERS["metaspace"]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    stream, shown = text_stream(detokenizer(tokenizer), stops), ""
    for piece in [ids] if at_once else [[token] for token in ids]:
        stream, new = read(stream, piece)
        shown += new
    assert stream.stopped_by == stopped_by
    assert shown + finish(stream)[1] == text


def test_half_a_character_before_a_special_stop_is_shown():
    tokenizer = TOKENIZERS["metaspace"]
    ids = [*byte_ids(tokenizer, "日")[:2], tokenizer.eos_token_id]
    stream, text = read(text_stream(detokenizer(tokenizer), ["</s>"]), ids)
    assert (text, stream.stopped_by) == ("\ufffd\ufffd", "</s>")


def test_min_tokens_exempts_a_special_stop():
    tokenizer = TOKENIZERS["metaspace"]
    eos, a = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")
    stream, text = read(text_stream(detokenizer(tokenizer), ["</s>"], min_tokens=2), [a, eos])
    assert (text, stream.stopped_by) == ("a", None)
    assert read(stream, [a, eos])[0].stopped_by == "</s>"


@pytest.mark.parametrize("stop", ["</s>\n", "a</s>", "<s></s>"])
def test_a_stop_string_with_a_special_token_in_it_is_refused(stop):
    with pytest.raises(ValueError, match="is a special token, which has no text; give '<"):
        text_stream(detokenizer(TOKENIZERS["metaspace"]), [stop])


@any_tokenizer
def test_cost_per_token_is_constant(tokenizer):
    sizes = []
    detok = detokenizer(tokenizer)
    detok = attrs.evolve(
        detok, decode=lambda ids, decode=detok.decode: sizes.append(len(ids)) or decode(ids)
    )
    for token in sorted(detok.visible):  # among them long runs of bytes that are no text
        detok, _ = push(detok, [token])
    assert sizes and max(sizes) <= 3 * (2 * N_KEPT + 1)  # a replacement is three bytes


def test_tokens_without_text_change_nothing_around_them():
    tokenizer = TOKENIZERS["metaspace, first piece stripped"]
    the, bos, unknown = (
        tokenizer.convert_tokens_to_ids("▁the"),
        tokenizer.bos_token_id,
        len(tokenizer),
    )
    detok, first = push(detokenizer(tokenizer), [bos, the])
    detok, _ = push(detok, [bos] * 10 + [unknown] * 10)
    assert (first, push(detok, [the])[1]) == ("the", " the")


def test_an_older_detokenizer_is_untouched():
    start = detokenizer(TOKENIZERS["metaspace"])
    word = TOKENIZERS["metaspace"].convert_tokens_to_ids(["▁the"])
    assert push(start, word) == push(start, word)
    assert start.window == ()


def test_without_a_tokenizer_all_text_is_empty():
    detok, text = push(detokenizer(None), [1, 2, 3])
    assert (text, flush(detok)) == ("", "")


def brute_force_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop that completes first, longest first, by looking at every prefix of the text."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


stop_texts = st.text("ab.", max_size=20)
stop_lists = st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4)


@given(text=stop_texts, stops=stop_lists, data=st.data())
@example(text="abc", stops=["abcd", "bc"], data=None)
def test_stops_are_found_however_the_text_is_cut(text, stops, data):
    shown, held, stopped_by = "", "", None
    for piece in pieces_of(data, text) if data else text:
        if stopped_by is None:
            out, held, stopped_by = split_at_stop(held + piece, stops)
            shown += out
            assert brute_force_stop(text, stops)[0].startswith(shown)
    assert (shown + held, stopped_by) == brute_force_stop(text, stops)


@given(text=stop_texts, stops=stop_lists)
def test_only_what_could_become_a_stop_is_held(text, stops):
    shown, held, stopped_by = split_at_stop(text, stops)
    if stopped_by is None:
        assert shown + held == text
        assert held == "" or any(stop.startswith(held) for stop in stops)


@any_tokenizer
@fewer
@given(data=st.data())
def test_a_stream_is_the_full_decode_cut_at_the_stop(tokenizer, data):
    ids = data.draw(ids_of(tokenizer))
    text = full_decode(tokenizer, ids)
    stops = data.draw(st.lists(st.text("the a日本.", min_size=1, max_size=3), max_size=3))
    if text and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + data.draw(st.integers(1, 5))])
    stream, shown = text_stream(detokenizer(tokenizer), stops), ""
    for piece in pieces_of(data, ids):
        stream, new = read(stream, piece)
        shown += new
        assert brute_force_stop(text, stops)[0].startswith(shown)
    stream, rest = finish(stream)
    assert (shown + rest, stream.stopped_by) == brute_force_stop(text, stops)
    assert read(stream, ids)[1] == "" or stream.stopped_by is None


def test_min_tokens_exempts_the_first_tokens():
    tokenizer = TOKENIZERS["metaspace"]
    the, a = tokenizer.convert_tokens_to_ids(["▁the", "a"])
    stream, shown = read(
        text_stream(detokenizer(tokenizer), ["the", " thea"], min_tokens=2), [the, a]
    )
    assert (shown, stream.stopped_by) == (" thea", None)
    stream, shown = read(stream, [a, the])
    assert (shown, stream.stopped_by) == ("a ", "the")


def test_a_stop_needs_a_tokenizer():
    with pytest.raises(ValueError, match="no tokenizer to find stop"):
        text_stream(detokenizer(None), ["x"])


CHAT = """
{%- for m in messages %}<s>{{ m.role }}{{ m.content }}</s>{% endfor %}
{%- if add_generation_prompt %}<s>{% endif %}"""


@pytest.fixture
def chat_tokenizer():
    """Byte fallback for every letter, a BOS before every text, and a chat template that writes its
    own BOS."""
    wrapped = word_tokenizer(METASPACE)
    bos = wrapped.bos_token_id
    wrapped.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    wrapped.chat_template = CHAT
    return wrapped


def test_each_form_of_prompt_is_encoded(chat_tokenizer):
    bos, eos, a = (
        chat_tokenizer.bos_token_id,
        chat_tokenizer.eos_token_id,
        chat_tokenizer.convert_tokens_to_ids("a"),
    )
    assert encode(chat_tokenizer, "a") == [bos, a]
    assert encode(chat_tokenizer, (3, 1)) == encode(chat_tokenizer, np.array([3, 1])) == [3, 1]
    messages = {"messages": [{"role": "a", "content": "aa"}]}
    assert encode(chat_tokenizer, messages) == [bos, a, a, a, eos, bos]
    assert all(type(token) is int for token in encode(chat_tokenizer, np.array([3, 1])))


ASKED = {"messages": [{"role": "user", "content": "a"}]}
BAD_PROMPTS = [
    ("", "is empty"),
    ([], "is empty"),
    (None, "give a str, a list of token ids, or"),
    (7, "give a str, a list of token ids, or"),
    (b"bytes", "give a str, a list of token ids, or"),
    ({1, 2}, "give a str, a list of token ids, or"),
    ([1.0], "whole numbers of 0 or more"),
    ([True], "whole numbers of 0 or more"),
    ([-1], "whole numbers of 0 or more"),
    (["a", 1], "whole numbers of 0 or more"),
    ("\udcff", "not valid Unicode"),
    ({}, '"messages" must be a list of at least one'),
    ({"messages": []}, '"messages" must be a list of at least one'),
    ({"messages": "a"}, '"messages" must be a list of at least one'),
    ({"role": "user", "content": "a"}, 'is a message; give {"messages": [it]}'),
    ({"message": ["a"]}, "a prompt has no 'message'; did you mean messages?"),
    ({**ASKED, "chat_template_kwargs": {}}, "did you mean template_options?"),
    ({**ASKED, "tools": "a"}, "tools is 'a'; give a list of JSON schemas"),
    ({**ASKED, "tools": [print]}, "give a list of JSON schemas"),
    ({**ASKED, "tools": [{"type": "function"}]}, "it has no tools; leave it out"),
    (
        {**ASKED, "template_options": ["a"]},
        "template_options is ['a']; give the template's variables",
    ),
    ({**ASKED, "template_options": {"tools": []}}, "tools have a key of their own"),
    (
        {**ASKED, "template_options": {"enable_thinkin": False}},
        "it has no enable_thinkin; leave it out",
    ),
    ({**ASKED, "template_options": {"tokenize": False}}, "it has no tokenize; leave it out"),
    ({**ASKED, "continue_final_message": 1}, "continue_final_message is 1; give True or False"),
    ({**ASKED, "continue_final_message": True}, "to continue it, let it be the assistant's"),
    ({"messages": ["a"]}, 'give {"role": str, "content": str or list of parts}'),
    ({"messages": [{"role": "user"}]}, 'give {"role": str, "content": str or list of parts}'),
    ({"messages": [{"role": "user", "content": 3}]}, "give a str or a list of parts"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "a part of a message is 'a'; give"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "a part of a message is {'type': 'text'}; give",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udcff"}]}]},
        "not valid Unicode",
    ),
    ({"messages": [{"role": "user", "content": "\udcff"}]}, "not valid Unicode"),
]


@pytest.mark.parametrize(
    ("prompt", "message"), BAD_PROMPTS, ids=[repr(prompt) for prompt, _ in BAD_PROMPTS]
)
def test_a_bad_prompt_is_refused(chat_tokenizer, prompt, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        encode(chat_tokenizer, prompt)


RICH = """
{%- for m in messages %}<s>{{ m.role }}{{ m.name }}{{ m.content }}{% for call in m.tool_calls or () %}{{ call.name }}
{%- endfor %}</s>{% endfor %}{% for tool in tools or () %}{{ tool.name }}{% endfor %}
{%- if add_generation_prompt %}<s>{% if enable_thinking is defined and not enable_thinking %}..{% endif %}{% endif %}"""


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (ASKED, "<s>usera</s><s>"),
        ({**ASKED, "template_options": {"enable_thinking": False}}, "<s>usera</s><s>.."),
        (
            {**ASKED, "template_options": {"enable_thinking": True}, "tools": None},
            "<s>usera</s><s>",
        ),
        ({**ASKED, "tools": [{"name": "a."}]}, "<s>usera</s>a.<s>"),
        ({"messages": [{"role": "tool", "name": "a", "content": "."}]}, "<s>toola.</s><s>"),
        (
            {"messages": [{"role": "a", "content": "", "tool_calls": [{"name": "a."}]}]},
            "<s>aa.</s><s>",
        ),
        (
            {
                "messages": [*ASKED["messages"], {"role": "assistant", "content": "a."}],
                "continue_final_message": True,
            },
            "<s>usera</s><s>assistanta.",
        ),
    ],
)
def test_a_template_gets_all_that_is_given(chat_tokenizer, prompt, text):
    chat_tokenizer.chat_template = RICH
    assert encode(chat_tokenizer, prompt) == chat_tokenizer.encode(text, add_special_tokens=False)


def test_a_template_that_fails_over_its_messages_is_bad_input(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ messages[0].tool_calls + 'a' }}"
    with pytest.raises(
        ValueError, match="chat template refuses these messages: can only concatenate"
    ):
        encode(chat_tokenizer, {"messages": [{"role": "a", "tool_calls": ["a"]}]})


def test_parts_of_text_are_joined(chat_tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "a"}]
    joined = encode(chat_tokenizer, {"messages": [{"role": "user", "content": parts}]})
    assert joined == encode(chat_tokenizer, {"messages": [{"role": "user", "content": "aa"}]})


def test_without_a_tokenizer_only_ids_are_taken(chat_tokenizer):
    messages = {"messages": [{"role": "user", "content": "a"}]}
    assert encode(None, [1, 2]) == [1, 2]
    with pytest.raises(ValueError, match="no tokenizer to encode 'hello'; give token ids"):
        encode(None, "hello")
    with pytest.raises(ValueError, match="no tokenizer with a chat template"):
        encode(None, messages)
    chat_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no tokenizer with a chat template"):
        encode(chat_tokenizer, messages)


def test_a_template_that_refuses_is_bad_input(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        encode(chat_tokenizer, {"messages": [{"role": "user", "content": "a"}]})


def test_a_tokenizer_is_loaded_from_its_folder(chat_tokenizer, tmp_path):
    chat_tokenizer.save_pretrained(tmp_path)
    assert encode(load_tokenizer(tmp_path), "a") == encode(chat_tokenizer, "a")


def test_a_folder_without_tokenizer_gives_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="no tokenizer can be made from the files in"):
        load_tokenizer(tmp_path)


def test_the_demo_model_gets_its_chat_template(demo_model):
    prompt = {"messages": [{"role": "user", "content": "Hi"}]}
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = tokenizer.decode(encode(load_tokenizer(demo_model), prompt))
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
