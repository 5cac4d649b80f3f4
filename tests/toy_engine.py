"""An engine over the toy model: its tokens are known in advance, a step takes a millisecond."""

from __future__ import annotations

import itertools
import time

import attrs

from nva.engine import Engine
from nva.forward import KV
from nva.loop import Steps
from nva.state.engine import empty
from nva.state.limits import Limits
from nva.testing import ToyKV, toy_forward, toy_sample, toy_tokens
from nva.text.detokenize import Detokenizer

LIMITS = Limits(
    vocab_size=7,
    max_model_len=256,
    n_blocks=400,
    block_size=4,
    max_rows=8,
    max_batched_tokens=64,
)


def letters(ids) -> str:
    """The text of tokens: a letter each."""
    return "".join("abcdefg"[token] for token in ids)


class Letters:
    """A tokenizer of that text."""

    def encode(self, text: str, **_) -> list[int]:
        return ["abcdefg".index(letter) for letter in text]


def toy_engine(limits: Limits = LIMITS, seconds: float = 0.0, **steps) -> Engine:
    """An engine whose steps take this long, and whose step functions may be one's own."""
    toy = toy_forward(limits)

    def forward(params, kv, batch):
        time.sleep(seconds)
        held = attrs.evolve(kv.layers, generation=kv.generation)
        logits, _ = toy(None, held, batch)
        return logits, kv.renew(batch.after)

    return Engine(
        name="toy",
        checkpoint=None,
        params=None,
        forward=forward,
        steps=Steps(**{"sample": toy_sample} | steps),
        kv=KV(ToyKV.empty(limits)),
        state=empty(limits),
        tokenizer=Letters(),
        reader=None,
        detokenizer=Detokenizer(decode=letters, visible=frozenset(range(7))),
        eos_ids=frozenset(),
        defaults={"temperature": 0.0},
    )


def expected(prompt: str, n: int) -> str:
    """The text that follows a prompt."""
    ids = Letters().encode(prompt)
    return letters(toy_tokens(ids, n, LIMITS.vocab_size))


def prompts_of(n: int) -> list[str]:
    """So many prompts, all different."""
    return ["".join(each) for each in itertools.islice(itertools.product("abcdefg", repeat=4), n)]
