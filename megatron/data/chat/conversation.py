"""A record of a file as a conversation: a list of messages with roles."""

from __future__ import annotations

from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's names: `{"from": "human", "value": "..."}`.
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}


class BadConversation(ValueError):
    """Why a record is no conversation that can be trained on."""


def conversation_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a record, each with `role`, `content` and what else it has.

    Args:
        value: of the record's key: a list of `{"role", "content"}`, or ShareGPT's list of `{"from", "value"}`.

    Raises:
        BadConversation: it is something else, has an unknown role, or no assistant answers in it.
    """
    if not isinstance(value, list) or not value:
        raise BadConversation("a conversation must be a list of messages")
    found = [_message(number, each) for number, each in enumerate(value, 1)]
    if not any(each["role"] == "assistant" for each in found):
        raise BadConversation("no message is the assistant's")
    return found


def _message(number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadConversation(f"message {number} must be an object with role and content")
    message = {key: part for key, part in value.items() if part is not None}  # tables fill absent keys with null
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message = {**message, "role": SHAREGPT.get(role, role) if isinstance(role, str) else role}
        message["content"] = message.pop("value", None)
    if (role := message.get("role")) not in ROLES:
        raise BadConversation(f"message {number} has the role {role!r}, which must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        message["content"] = content = ""
    if not isinstance(content, str):
        raise BadConversation(f"message {number} must have a text as content")
    return message
