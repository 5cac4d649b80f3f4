"""What a user asks (SamplingParams, Request) and what an engine answers for one sample (Finished).

The one law: a record is complete and valid from its first moment, so no step ever checks a user's
input again. Read next: plan.py for what happens in between."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any, Literal, cast

import attrs
import numpy as np
from attrs.validators import optional

from nva.state.checks import (
    LARGEST,
    LARGEST_INT32,
    Validator,
    as_python,
    as_whole,
    described,
    flag,
    is_list,
    is_number,
    is_whole,
    knows_names,
    number,
    whole,
)
from nva.state.columns import Column, Int, array_field
from nva.state.media import Media

FinishReason = Literal["stop", "length", "abort"]

DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "max_tokens": 256,
    "repetition_penalty": 1.0,
}
"""What a field left unset becomes when the checkpoint's generation_config.json doesn't say
either."""

_MAX = 1e6
"""The largest temperature or penalty. It is far beyond any use, and far below float32's largest
number, near which products would become infinite and then NaN."""

OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "do_sample": "temperature (0 is greedy)",
    "num_return_sequences": "n",
    "best_of": "n",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "use_beam_search": "examples/beam_search.py",
    "num_beams": "examples/beam_search.py",
}


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _token_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    return _as_tuple(value)


def _biases(value: Mapping[int, float] | Iterable[tuple[int, float]] | None) -> dict[int, float]:
    return _as_dict(value)


def _as_tuple(value: Any) -> Any:
    """A list of any kind as a tuple, None as an empty one; what is no list is left to the
    validator."""
    if value is None:
        return ()
    if is_list(value) or isinstance(value, (Set, np.ndarray)):
        return tuple(as_whole(each) for each in cast("Collection[Any]", value))
    return value


def _as_dict(value: Any) -> Any:
    """A mapping, or pairs, as a dict, None as an empty one; what is neither is left to the
    validator. JSON has no ids as keys, so "5" is taken for 5."""
    try:
        pairs = dict[Any, Any](() if value is None else value)
    except (TypeError, ValueError):
        return value
    if _is_plain_bias(pairs):
        return pairs
    return {_as_id(token): as_python(bias) for token, bias in pairs.items()}


def _as_id(token: Any) -> Any:
    is_digits = isinstance(token, str) and token.isascii() and token.isdecimal()
    return int(token) if is_digits and len(token) < 20 else as_whole(token)


def _as_top_k(value: Any) -> Any:
    """A whole number; -1, which vLLM takes for all tokens, as 0."""
    value = as_whole(value)
    return 0 if is_whole(value) and value == -1 else value


def _check_stop(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    is_list_of_texts = isinstance(value, tuple) and all(
        isinstance(text, str) and text for text in cast("tuple[Any, ...]", value)
    )
    if not is_list_of_texts:
        raise ValueError(
            f"{field.name} is {value!r:.80}; give one string or a list of them, none empty"
        )


def _check_ids(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    is_list_of_ids = isinstance(value, (tuple, frozenset)) and all(
        is_whole(token) and token >= 0 for token in cast("Collection[Any]", value)
    )
    if not is_list_of_ids:
        raise ValueError(f"{field.name} is {value!r:.80}; give a list of token ids, 0 or above")


def _is_plain_bias(bias: dict[Any, Any]) -> bool:
    """Whether these are token ids and numbers, all of Python's own types: a pass at C's speed over
    each, where asking entry by entry takes 0.3 s for a whole vocabulary."""
    if not ({*map(type, bias)} <= {int} and {*map(type, bias.values())} <= {int, float}):
        return False
    try:
        return min(bias, default=0) >= 0 and not any(map(math.isnan, bias.values()))
    except OverflowError:  # a whole number that no float can hold
        return False


def _check_bias(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    form = "give token ids and numbers to add to their logits"
    if not isinstance(value, dict):
        raise ValueError(f"{field.name} is {value!r:.80}; {form}, such as {{5: -1.5}}")
    if _is_plain_bias(cast("dict[Any, Any]", value)):
        return
    for token, bias in cast("dict[Any, Any]", value).items():
        if not is_whole(token) or token < 0 or not is_number(bias) or math.isnan(bias):
            raise ValueError(f"{field.name} has {token!r:.80}: {bias!r:.80}; {form}")


_ANY_SIGN = number(-_MAX, _MAX)


def _setting(text: str, check: Validator, default: Any = None, converter: Any = as_python) -> Any:
    """A field of one value, with what it means. Where the default is None, None leaves it unset."""
    return attrs.field(
        default=default,
        converter=converter,
        validator=optional(check) if default is None else check,
        metadata={"help": text},
    )


def _count(text: str, low: int, default: int | None = None, high: int = LARGEST) -> Any:
    """A field of a whole number of at least `low`, with what it means."""
    return _setting(text, whole(low, high), default, as_whole)


@described
@knows_names("SamplingParams", OTHER_NAMES)
@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to choose tokens. Every field has a default; None means: the checkpoint's
    generation_config, then DEFAULTS.

    The order is: penalties and bias, temperature, min_p, top_k, top_p. steps/filters.py says what
    each of them does, in a few lines. Raises ValueError for a bad value or an unknown name."""

    temperature: float | None = _setting(
        "0 always takes the likeliest token, higher is more varied", number(0, _MAX)
    )
    top_k: int | None = _setting(
        "draw from this many likeliest tokens, 0 for all", whole(0), converter=_as_top_k
    )
    top_p: float | None = _setting(
        "draw from the likeliest tokens that together have this probability",
        number(0, 1, above=True),
    )
    min_p: float | None = _setting(
        "draw from tokens at least this fraction as likely as the likeliest", number(0, 1)
    )
    max_tokens: int | None = _count("tokens of the answer at most", 1)
    min_tokens: int = _count("don't end the answer before this many tokens", 0, default=0)
    stop: tuple[str, ...] = attrs.field(
        default=(),
        converter=_strings,
        validator=_check_stop,
        metadata={"help": "end the answer before this text"},
    )
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(),
        converter=_token_ids,
        validator=_check_ids,
        metadata={"help": "end the answer at this token"},
    )
    ignore_eos: bool = _setting("don't end where the model would", flag, False)
    seed: int | None = _count("makes an answer repeatable", 0, high=2**64 - 1)
    n: int = _count("answers to each prompt", 1, default=1)
    logprobs: int | None = _count(
        "log-probabilities of this many likeliest tokens at each position of the answer", 0
    )
    prompt_logprobs: int | None = _count("the same for the prompt", 0)
    repetition_penalty: float | None = _setting(
        "above 1, avoid tokens of the prompt and the answer", number(0, _MAX, above=True)
    )
    presence_penalty: float = _setting("above 0, avoid tokens of the answer", _ANY_SIGN, 0.0)
    frequency_penalty: float = _setting(
        "above 0, avoid tokens of the answer the more often they occur", _ANY_SIGN, 0.0
    )
    priority: float = _setting('under the policy "priority", lower goes first', number(), 0.0)
    logit_bias: dict[int, float] = attrs.field(
        factory=dict,
        converter=_biases,
        validator=_check_bias,
        hash=False,
        metadata={"help": "add to the logit of this token; minus infinity bans it"},
    )
    tag: Any = attrs.field(
        default=None,
        eq=False,
        metadata={
            "help": "yours, for a policy or scheduler of your own to read, such as a user or a "
            "deadline; nva never reads it, and records that differ in it alone are equal"
        },
    )

    def resolve(self, defaults: Mapping[str, Any] = DEFAULTS) -> SamplingParams:
        """The same parameters with every unset field filled in, from `defaults` first."""
        unset = {
            name: defaults.get(name, DEFAULTS[name])
            for name in DEFAULTS
            if getattr(self, name) is None
        }
        return attrs.evolve(self, **unset) if unset else self


ROW_PARAMS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("repetition_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("seed", "u8"),
        ("n_logprobs", "i4"),
        ("min_len", "i4"),
        ("is_penalized", "?"),
        ("is_biased", "?"),
    ]
)
"""What each step reads of a request's SamplingParams, as one element of a column.

n_logprobs: how many of the likeliest tokens to report at each position, with the token drawn;
NO_LOGPROBS to report nothing. min_len: length of the sequence before it may stop."""

NO_LOGPROBS = -1


@attrs.frozen(kw_only=True)
class Request:
    """One prompt with resolved parameters.

    id: the caller's name for it, unique among the requests in flight. stop_ids: token ids that end
    a sample."""

    id: int | str
    prompt: Int = array_field()  # [n_prompt] int32
    params: SamplingParams = attrs.field()
    stop_ids: frozenset[int] = attrs.field(
        factory=frozenset, converter=frozenset, validator=_check_ids
    )
    media: Media | None = None

    @property
    def tag(self) -> Any:
        """What the caller wants a policy or scheduler to know: params.tag."""
        return self.params.tag

    @params.validator  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator, reportAttributeAccessIssue]
    def _is_resolved(self, _: object, params: SamplingParams) -> None:
        unset = [name for name in DEFAULTS if getattr(params, name) is None]
        if unset:
            raise ValueError(
                f"request {self.id!r} leaves {', '.join(unset)} unset; pass params.resolve()"
            )


def request(
    id: int | str,  # noqa: A002 - the field's name
    prompt: Any,
    params: SamplingParams | None = None,
    **fields: Any,
) -> Request:
    """A request from a list of token ids, its unset parameters filled with DEFAULTS."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"request {id!r}: the prompt is {prompt!r:.80}; give at least one token id, all whole "
            "numbers"
        )
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(
            f"request {id!r}: token ids span [{ids.min()}, {ids.max()}]; give ids of the vocabulary"
        )
    params = (params or SamplingParams()).resolve()
    return Request(id=id, prompt=ids.astype(np.int32), params=params, **fields)


def sampling_of(request: Request, seed: int) -> Column:
    """The request's element of a ROW_PARAMS column; `seed` is for requests that bring none."""
    params = request.params
    element = np.zeros((), ROW_PARAMS)
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        element[name] = getattr(params, name)
    element["seed"] = seed if params.seed is None else params.seed
    element["top_k"] = min(params.top_k or 0, LARGEST_INT32)
    element["n_logprobs"] = (
        NO_LOGPROBS if params.logprobs is None else min(params.logprobs, LARGEST_INT32)
    )
    element["min_len"] = min(len(request.prompt) + params.min_tokens, LARGEST_INT32)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    element["is_penalized"] = penalties != (1.0, 0.0, 0.0)
    element["is_biased"] = bool(params.logit_bias)
    return element


@attrs.frozen(kw_only=True)
class Finished:
    """One sample that ended, and why. stopped_by: the token id or string that ended it, None for
    length and abort."""

    request: Request
    sample: int
    reason: FinishReason
    stopped_by: int | str | None
    token_ids: tuple[int, ...]  # the output, a stop token included
    n_cached: int  # prompt tokens whose computation the prefix cache saved
