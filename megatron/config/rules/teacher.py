"""Distillation: the teacher exists, reads the same tokens, and fits the layout."""

import shlex
from collections.abc import Iterator
from pathlib import Path as File

from ..features.objective_kind import objective_kind
from ..foreign import advice, neox_checkpoint
from ..problems import ConfigError, Problem, UserError
from ..rule_context import RuleContext
from ..teacher import META, on_layout, same_tokens, teacher_config


def there_is_a_teacher(context: RuleContext) -> Iterator[Problem]:
    kind, objective = objective_kind(context.config), context.config.objective
    if kind is not None and kind.teacher and objective.teacher is None:
        rule = f"objective.type: {objective.type} must have a teacher"
        fix = "give objective.teacher, the folder of a checkpoint"
        yield context.problem("objective.teacher objective.type", rule=rule, fix=fix)


def teacher_computes_next_tokens_on_one_stage(context: RuleContext) -> Iterator[Problem]:
    if _teaches(context) and context.config.parallel.pipeline > 1:
        yield context.problem(
            "parallel.pipeline objective.teacher",
            rule="must be 1 with a teacher: a pipeline sends on the stream of one model, not of two",
            fix="use parallel.pipeline=1 (zero.stage=3 or parallel.tensor make room instead)",
        )
    if _teaches(context) and context.option("model.multi_token_prediction.depth"):
        yield context.problem(
            "model.multi_token_prediction.depth objective.teacher",
            rule="must be 0 with a teacher, which has no targets for tokens further ahead",
            fix="use depth: 0, or another objective",
        )


def teacher_exists(context: RuleContext) -> Iterator[Problem]:
    teacher = context.config.objective.teacher
    if teacher is None or not _teaches(context) or (File(teacher) / META).is_file():
        return
    yield context.problem("objective.teacher", rule=f"must be a checkpoint: {_is_none(teacher)}", fix=_way(teacher))


def teacher_reads_the_same(context: RuleContext) -> Iterator[Problem]:
    """Its logits are compared id by id, so ids must mean the same."""
    config, teacher = context.config, _readable(context)
    if teacher is None:
        return
    try:
        other = teacher_config(teacher)
    except ConfigError as error:  # names the checkpoint already
        yield from error.problems
        return
    except UserError as error:
        yield context.problem("objective.teacher", rule=f"must be a checkpoint: {error}", fix="give another one")
        return
    if other.model.vocab_size != config.model.vocab_size:
        yield context.problem(
            "model.vocab_size objective.teacher",
            rule=f"must be the teacher's, whose embedding has {other.model.vocab_size} rows",
            fix=f"use model.vocab_size={other.model.vocab_size}, or a teacher with the same vocabulary",
        )
    key = "tokenizer.path" if config.tokenizer.type == other.tokenizer.type else "tokenizer.type"
    rule = "must be the teacher's tokenizer, since ids are compared one by one"
    same = same_tokens(config.tokenizer, other.tokenizer)
    if same is None:
        rule, fix = f"{rule}. It cannot be checked here", "make sure that both read the same ids"
        yield context.warning(key, "objective.teacher", rule=rule, fix=fix)
    elif not same:
        rule, fix = f"{rule}: {_named(other.tokenizer)}", "use the tokenizer that the teacher has"
        yield context.problem(key, "objective.teacher", rule=rule, fix=fix)


def teacher_fits_the_layout(context: RuleContext) -> Iterator[Problem]:
    teacher = _readable(context)
    if teacher is None or context.resolve is None or context.config.parallel.pipeline > 1:
        return
    try:
        same = teacher_config(teacher).model.vocab_size == context.config.model.vocab_size
    except UserError:
        return  # reported by the rule above
    try:
        if same:
            context.resolve(on_layout(context.config), ranks=context.ranks)
    except ConfigError as error:
        for each in error.problems:
            if each.fatal:
                rule = f"must fit the run's layout and sequences. Its own {each.key}: {each.rule}"
                fix = "choose a layout that both models fit, or another teacher"
                yield context.problem("objective.teacher", rule=rule, fix=fix)


def _teaches(context: RuleContext) -> bool:
    kind = objective_kind(context.config)  # a class without a kind may have one
    return context.config.objective.teacher is not None and (kind is None or kind.teacher)


def _readable(context: RuleContext) -> str | None:
    """The teacher's folder, if it is a checkpoint."""
    teacher = context.config.objective.teacher
    return teacher if teacher is not None and _teaches(context) and (File(teacher) / META).is_file() else None


def _is_none(teacher: str) -> str:
    if "://" in teacher:
        return "a URL cannot be read here"
    return f"{teacher} is none" if File(teacher).exists() else f"there is no folder {teacher} (seen from {File.cwd()})"


def _way(teacher: str) -> str:
    """How to get a checkpoint from the folder."""
    folder, quoted = File(teacher), shlex.quote(teacher)
    saved = sorted(folder.glob("checkpoints/step_*")) or sorted(folder.glob("step_*"))
    if saved:  # not chosen for the user: the newest one of an active run changes
        return f"use objective.teacher={saved[-1]}"
    if (folder / "config.json").is_file():
        return f"deepy checkpoint from-hf {quoted} OUT makes a checkpoint of it. Then objective.teacher=OUT"
    if "://" not in teacher and (step := neox_checkpoint(teacher)) is not None:
        return advice(step, weights=True).replace("checkpoint.initialize_from", "objective.teacher")
    return "give the folder of a checkpoint of this program"


def _named(tokenizer: object) -> str:
    return f"{getattr(tokenizer, 'type', '')} {getattr(tokenizer, 'path', None) or ''}".strip()


INPUT_RULES = (teacher_exists,)
