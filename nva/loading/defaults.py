"""What a checkpoint's generation_config.json says of sampling: the defaults of SamplingParams.

The law: a value that can't be used is refused when the model loads, by the file's name and its own,
so that no request is blamed for it. Read next: state/request.py, SamplingParams.resolve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nva.state.request import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in the file -> field of SamplingParams. null means unset."""


_WHOLE = ("top_k", "max_new_tokens")


def read_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams and their defaults. Greedy where do_sample is false.

    Raises ValueError for a value that is none.
    """
    found = {
        field: _read(name, field, generation_config[name])
        for name, field in _NAMES.items()
        if generation_config.get(name) is not None
    }
    does_sample = generation_config.get("do_sample")
    if does_sample is not None and not isinstance(does_sample, bool):
        raise ValueError(_refusal("do_sample", does_sample, "give true or false"))
    if does_sample is False:
        found["temperature"] = 0.0
    return found


def _read(name: str, field: str, value: Any) -> Any:
    """The value as SamplingParams has it; 50.0 is a whole number too."""
    if name in _WHOLE and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return getattr(SamplingParams(**{field: value}), field)
    except ValueError as error:
        allowed = str(error).partition("; ")[2]
        raise ValueError(_refusal(name, value, allowed)) from error


def _refusal(name: str, value: Any, allowed: str) -> str:
    return f"generation_config.json has {name} = {value!r:.80}; {allowed}, or remove it there"
