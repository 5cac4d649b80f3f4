"""A conversation as token ids, by the checkpoint's own chat template.

A prompt with "messages" may also have "tools", a list of JSON schemas; "template_options",
variables of the template, such as {"enable_thinking": False}; and "continue_final_message": True,
where the answer is to go on from the end of the last message, the assistant's. A message may have
whatever the template reads: tool_calls, name, ... The law: what a prompt gives reaches the
template, or is refused. Read next: text.py for all other text, images.py for images."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from nva.state.errors import check_names

Tokenizer = Any
"""A tokenizer of transformers; its type is not named here, because importing transformers takes
seconds."""

CHAT_KEYS = ("messages", "tools", "template_options", "continue_final_message")


def encode_messages(tokenizer: Tokenizer | None, prompt: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's answer begins or its last message is
    to go on."""
    messages, options = check_messages(prompt), check_options(prompt)
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            "the checkpoint has no tokenizer with a chat template; give a str or token ids, not "
            "messages"
        )
    try:
        check_template(tokenizer, options)
        return list(tokenizer.apply_chat_template(messages, **options, return_dict=False))
    # a template is a program of the checkpoint's, and may fail in any way over messages
    except Exception as error:
        raise ValueError(
            f"the checkpoint's chat template refuses these messages: {error}"
        ) from error


def check_messages(prompt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a prompt, for a chat template, which knows what else may be in one than a
    role and content.

    Content is text, or a list of parts; those that are text alone are joined, so that every
    template takes them."""
    if {"role", "content"} <= set(prompt):
        raise ValueError(f'the prompt {prompt!r:.80} is a message; give {{"messages": [it]}}')
    check_names(
        "a prompt",
        prompt,
        CHAT_KEYS,
        {"chat_template_kwargs": "template_options", "functions": "tools"},
    )
    if not is_list(prompt.get("messages")) or not prompt["messages"]:
        raise ValueError(f'the prompt is {prompt!r:.80}; "messages" must be a list of at least one')
    return [check_message(message) for message in prompt["messages"]]


def check_message(message: Any) -> dict[str, Any]:
    """A message for a chat template. One that calls tools may lack content."""
    if (
        not isinstance(message, Mapping)
        or not isinstance(message.get("role"), str)
        or len(message) < 2
    ):
        raise ValueError(
            f'a message is {message!r:.80}; give {{"role": str, "content": str or list of parts}}'
        )
    has_content = message.get("content") is not None or not message.get("tool_calls")
    return (
        {**message, "content": check_content(message.get("content"))}
        if has_content
        else dict(message)
    )


def check_options(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """What a prompt gives to a chat template beside the messages."""
    goes_on, tools = prompt.get("continue_final_message", False), prompt.get("tools")
    options, last = prompt.get("template_options", {}), prompt["messages"][-1]
    if not isinstance(goes_on, bool):
        raise ValueError(f"continue_final_message is {goes_on!r:.80}; give True or False")
    if goes_on and (last["role"] != "assistant" or not isinstance(last.get("content"), str)):
        raise ValueError(
            f"the last message is {last!r:.80}; to continue it, let it be the assistant's, with a "
            "str"
        )
    if tools is not None and not (
        is_list(tools) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise ValueError(
            f'tools is {tools!r:.80}; give a list of JSON schemas, {{"type": "function", ...}}'
        )
    own = {
        "tools": list(tools or ()) or None,
        "continue_final_message": goes_on,
        "add_generation_prompt": not goes_on,
    }
    if not isinstance(options, Mapping) or not all(
        isinstance(name, str) and name not in own for name in options
    ):
        forms = 'give the template\'s variables, such as {"enable_thinking": False}'
        raise ValueError(
            f"template_options is {options!r:.80}; {forms}; tools have a key of their own"
        )
    return {**options, **own}


def check_template(tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the checkpoint's chat template would pass over without a
    word."""
    template = tokenizer.get_chat_template(tools=options["tools"])
    own = [
        "continue_final_message",
        "add_generation_prompt",
        *(() if options["tools"] else ("tools",)),
    ]
    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {
        "tools",
        "documents",
    }
    for name in options.keys() - own:
        if name in taken or not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(f"it has no {name}; leave it out, or name what the template reads")


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether it is a list, of any kind, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def check_content(content: object) -> str | list[dict[str, str]]:
    """The content of a message for a chat template, which has no use for what an image shows."""
    if isinstance(content, str):
        return check_text(content)
    if not is_list(content):
        raise ValueError(
            f"the content of a message is {content!r:.80}; give a str or a list of parts"
        )
    parts = [check_part(part) for part in content]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def check_part(part: Any) -> dict[str, str]:
    """A part of a message's content: text or an image."""
    kind = (
        part.get("type")
        if isinstance(part, Mapping) and set(part) == {"type", part.get("type")}
        else None
    )
    if kind == "image":
        return {"type": kind}
    if kind == "text" and isinstance(part[kind], str):
        return {"type": kind, kind: check_text(part[kind])}
    forms = '{"type": "text", "text": str} or {"type": "image", "image": path or PIL image}'
    raise ValueError(f"a part of a message is {part!r:.80}; give {forms}")


def check_text(text: str) -> str:
    """The text, if it is Unicode: half of a surrogate pair, as broken input leaves behind, has no
    encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt {text!r:.80} is not valid Unicode: {error.reason} at {error.start}"
        ) from error
    return text
