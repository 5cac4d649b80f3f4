"""A conversation as token ids, by the checkpoint's own chat template.

A prompt with "messages" may also have "tools", a list of JSON schemas; "template_options",
variables of the template, such as {"enable_thinking": False}; "continue_final_message": True, where
the answer is to go on from the end of the last message, the assistant's; and
"parse_special_tokens": True, where special tokens written in messages are to be ones. A message may
have whatever the template reads: tool_calls, name, ... The law: what a prompt gives reaches the
template, or is refused; and the template alone writes special tokens. Read next: plain_text.py for
how that is held; prompts.py for all other text, images.py for images."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from nva.state.checks import is_list
from nva.state.errors import check_names
from nva.text.plain_text import encode_shielded, shield, unshield

Tokenizer = Any
"""A tokenizer of transformers; its type is not named here, because importing transformers takes
seconds."""

CHAT_KEYS = (
    "messages",
    "tools",
    "template_options",
    "continue_final_message",
    "parse_special_tokens",
)


def encode_messages(tokenizer: Tokenizer | None, prompt: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's answer begins or its last message is
    to go on."""
    messages, options = check_messages(prompt), check_options(prompt)
    parses = check_flag(prompt, "parse_special_tokens", False)
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            "the checkpoint has no tokenizer with a chat template; give a str or token ids, not "
            "messages"
        )
    text = _rendered(tokenizer, messages, options)
    written = (messages, options["tools"])
    shielded = written if parses else shield(tokenizer, written)
    if shielded is written:
        return list(tokenizer.encode(text, add_special_tokens=False))
    rendered = _rendered(tokenizer, shielded[0], {**options, "tools": shielded[1]})
    if unshield(tokenizer, rendered) != text:
        raise ValueError(
            "the messages hold special tokens, which the checkpoint's chat template treats in a "
            'way of its own; leave them out, or give "parse_special_tokens": True, with which they '
            "are no text"
        )
    return encode_shielded(tokenizer, rendered)


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> str:
    """The text of a conversation. Raises ValueError where the template can't write it."""
    try:
        check_template(tokenizer, options)
        return render(tokenizer, messages, options)
    # a template is a program of the checkpoint's, and may fail in any way over messages
    except Exception as error:
        raise ValueError(
            f"the checkpoint's chat template refuses these messages: {error}"
        ) from error


def render(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> str:
    """The text of a conversation. Arguments of tool calls that came as JSON text, as OpenAI's
    clients give them, are objects for a template that writes JSON itself.

    Some templates write them as they are instead: these get the text."""
    parsed = [_with_parsed_arguments(message) for message in messages]
    if parsed == messages:
        return _apply(tokenizer, messages, options)
    try:
        text = _apply(tokenizer, parsed, options)
    except Exception:  # such as `"Arguments: " + arguments`
        return _apply(tokenizer, messages, options)
    calls = [call for message in parsed for call in _calls(message)]
    shown = [repr(call["arguments"]) for call in calls if isinstance(call.get("arguments"), dict)]
    is_python = any(each in text for each in shown if each != "{}")
    return _apply(tokenizer, messages, options) if is_python else text


def _apply(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> str:
    """The template's text, cut where its last message is to go on.

    The cut is found by a mark at the message's end. The blanks behind the mark are gone where the
    template trims messages: then those before it, which the mark kept, are cut too."""
    options = dict(options)
    if not options.pop("continue_final_message"):
        return tokenizer.apply_chat_template(list(messages), **options, tokenize=False)
    mark, blanks = secrets.token_hex(16), " \n\t \n"
    last = messages[-1]["content"]
    marked = {**messages[-1], "content": last + mark + blanks}
    text = tokenizer.apply_chat_template([*messages[:-1], marked], **options, tokenize=False)
    before, found, after = text.rpartition(mark)
    if not found or last.strip() not in before:
        raise ValueError("it leaves out parts of the last message, which is to be continued")
    return before if after.startswith(blanks) else before.rstrip()


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions that a message calls, each with a name and arguments."""
    given = message.get("tool_calls")
    listed = [each for each in given if isinstance(each, dict)] if is_list(given) else []
    functions = [each.get("function", each) for each in listed]
    functions.append(message.get("function_call"))  # OpenAI's older form, one call a message
    return [each for each in functions if isinstance(each, dict)]


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with each call's arguments as an object, where they are JSON text of one."""
    if not any(isinstance(call.get("arguments"), str) for call in _calls(message)):
        return message
    copied = copy.deepcopy(message)
    for call in _calls(copied):
        call["arguments"] = _parsed(call.get("arguments"))
    return copied


def _parsed(arguments: Any) -> Any:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else arguments


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
    """A message for a chat template. One that calls tools may lack content, for which templates get
    no text: many look into it without asking whether it is there."""
    if (
        not isinstance(message, Mapping)
        or not isinstance(message.get("role"), str)
        or len(message) < 2
    ):
        raise ValueError(
            f'a message is {message!r:.80}; give {{"role": str, "content": str or list of parts}}'
        )
    is_call = bool(message.get("tool_calls") or message.get("function_call"))
    content = "" if is_call and message.get("content") is None else message.get("content")
    return {**message, "content": check_content(content)}


def check_flag(prompt: Mapping[str, Any], name: str, default: bool) -> bool:
    """A part of a prompt that is True or False."""
    value = prompt.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.80}; give True or False")
    return value


def check_options(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """What a prompt gives to a chat template beside the messages."""
    goes_on = check_flag(prompt, "continue_final_message", False)
    tools = prompt.get("tools")
    options, last = prompt.get("template_options", {}), prompt["messages"][-1]
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
        if name in taken or name not in template_variables(template):
            raise ValueError(f"it has no {name}; leave it out, or name what the template reads")


@functools.lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """The variables that a chat template reads and doesn't set itself."""
    from jinja2 import Environment, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The tag that marks what an assistant writes, for training: its body counts as it is."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=["jinja2.ext.loopcontrols", Generation])
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


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
