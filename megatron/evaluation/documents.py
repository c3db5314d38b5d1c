"""The texts of the harness's tasks: a model that has read them could know the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .harness import undisturbed
from .loading import load, named_tasks
from .select import Request, manager_for


def texts(requests: Sequence[Request], folders: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Names and texts of the scored documents of tasks: the prompt without examples, and the right answer."""
    with undisturbed():
        index = manager_for(requests, folders)
        tasks = {name: task for each in named_tasks(requests, index) for name, task in load(each, index).items()}
        for name, task in tasks.items():
            for number, document in enumerate(task.eval_docs):
                yield f"{name}:{number}", text_of(task, document)


def text_of(task: Any, document: dict[str, Any]) -> str:
    """A document of a task as one text, with the first right answer."""
    context, target = task.doc_to_text(document), task.doc_to_target(document)
    choices = task.doc_to_choice(document) if task.OUTPUT_TYPE == "multiple_choice" else None
    if choices and isinstance(context, int):  # the choices are beginnings of one given text
        context = choices[context]
    elif choices and isinstance(target, int):
        target = choices[target]
    if isinstance(target, (list, tuple)):
        target = target[0] if target else ""
    between = "" if str(context)[-1:].isspace() or str(target)[:1].isspace() else " "
    return f"{context}{between}{target}"
