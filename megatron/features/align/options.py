"""Keys and rules of reinforcement learning, without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.features.feature import Feature, Keys, only_where
from megatron.config.optimizer_kind import optimizer_kind
from megatron.config.problems import Problem, UserError
from megatron.config.registry import PATH
from megatron.config.section import Section, key

if TYPE_CHECKING:
    from megatron.config.rule_context import RuleContext

# Rewards and environments by name. Others are import paths.
REWARDS = {
    name: f"megatron.features.align.rewards:{name}" for name in ("exact", "number", "math", "format", "length", "tests")
} | {"reward_model": "megatron.features.align.reward_model:reward_model"}
ENVIRONMENTS = {
    name: f"megatron.features.align.environments:{name}"
    for name in ("addition", "arithmetic", "sorting", "reversal", "strings", "sudoku", "puzzles")
}
MATH_VERIFY = "math_verify"  # the module of the package math-verify
POLICY, ROLLOUTS = "policy", "rollouts"  # names of the objective and of the source of samples


class RewardSection(Section):
    type: str = key("", f"One of {', '.join(REWARDS)}, or the import path of a function (package.module:name).")
    weight: float = key(1.0, "Factor of this reward in the sum.")
    gate: bool = key(False, "Where this reward is 0, the whole sum is 0.")
    options: dict[str, Any] = key(dict, "Keyword arguments of the function.")


class ServerSection(Section):
    url: str | None = key(
        None, "Completions are drawn by this OpenAI-compatible server, such as http://localhost:8000."
    )
    type: Literal["vllm", "sglang"] = key("vllm", "How the server is asked to read new weights.")
    model: str = key("policy", "Name of the model in requests.")
    key_variable: str | None = key(
        None, "Name of the environment variable that has the server's key. The key is sent as a bearer token."
    )
    weights: str | None = key(
        None, "Folder of the weights, which the server sees too, for this run only. Default: weights in run.dir."
    )
    timeout: float = key(600.0, "For one answer.", unit="seconds", gt=0)
    limit: float = key(
        0.5,
        "Largest mean difference of log-probabilities of server and trainer in a round. Beyond it the run stops: the "
        "server has other weights.",
        gt=0,
    )


class AggregateSection(Section):
    rounds: int = key(0, "Rounds in which all candidates are drawn again, after tails of the last ones.", ge=0, le=100)
    tails: int = key(4, "Tails in a prompt, drawn from the candidates.", ge=1)
    tail: int = key(4096, "Last tokens of a candidate that are kept.", unit="tokens", ge=1)
    template: str = key("{tails}\n{problem}", "A prompt, with {tails} and {problem}.")


class AlignSection(Section):
    prompts: str | None = key(
        None,
        "JSON lines with `prompt` (a text) or `messages`, and what rewards read, such as `answer`. Or a token file.",
    )
    prompt_labels: str | None = key(None, "Label file of a token file: its first label ends a prompt, and is `answer`.")
    held_out: str | None = key(None, "Prompts of evaluations, in the same form.")
    held_out_labels: str | None = key(None, "Label file of a token file of held-out prompts.")
    environment: str | None = key(
        None,
        f"Makes problems in place of `prompts`: one of {', '.join(ENVIRONMENTS)}, or the import path of a function.",
    )
    difficulty: list[int] = key(lambda: [1, 1], "Least and largest difficulty of an environment's problems.")
    curriculum: float | None = key(
        None,
        "The largest difficulty of a round begins at the least. It rises by 1 where its problems' mean reward in the "
        "round before is above this number, and falls by 1 where none is above 0.",
    )
    template: str | None = key(None, "Chat template of `messages`: a name or a .jinja file. Default: the tokenizer's.")
    rewards: list[RewardSection] = key(list, "Their sum, each times its weight, is the reward of a completion.")
    group: int = key(8, "Completions of each prompt.", ge=1)
    updates: int = key(1, "Steps on each round of rollouts.", unit="steps", ge=1)
    behind: int = key(0, "A round is drawn by the weights from n rounds before its first step.", ge=0, le=100)
    tokens: int = key(128, "Most tokens of a completion.", unit="tokens", ge=1)
    stop: str | None = key(None, "A completion also ends with this text.")
    advantage: Literal["group", "mean", "leave_one_out", "max_rl", "reward"] = key(
        "group", "Advantages from the rewards of a group (docs/reinforcement_learning.md)."
    )
    dynamic_sampling: int = key(
        0, "Groups whose rewards are all equal are replaced by groups of further prompts, up to n times.", ge=0, le=100
    )
    mask_truncated: bool = key(False, "Completions that did not end do not count in the loss.")
    workers: int = key(4, "Processes that compute rewards.", gt=0, le=1024)
    time_limit: float = key(10.0, "For all rewards of one completion. After it the reward is 0.", unit="seconds", gt=0)
    texts: int = key(64, "Completions that a rank draws together.", gt=0)
    routes: Literal["trainer", "sampler"] = key(
        "trainer",
        "Whose experts `objective.options.replay` uses. trainer: of a pass by the weights that drew the round (R2). "
        "sampler: of the pass that drew each token (R3).",
    )
    server: ServerSection = key(ServerSection, "A server that draws completions, in place of the trainer's ranks.")
    evaluate: int | None = key(None, "Rounds between evaluations on held-out problems.", unit="rounds", gt=0)
    problems: int = key(128, "Held-out problems of an evaluation, each answered greedily.", gt=0)
    votes: int = key(0, "Evaluations also draw n answers to each problem, and count their majority.", ge=0, le=1024)
    vote_on: Literal["text", "number"] = key("text", "Two answers are equal by their whole text, or their last number.")
    aggregate: AggregateSection = key(AggregateSection, "Markovian RSA: answers drawn from the ends of others.")


class AlignKeys(Section):
    align: AlignSection = key(AlignSection, "Reinforcement learning (deepy align).")


TOP = Keys("", AlignKeys, after="objective")


def align_of(config: Any) -> AlignSection:
    """The section of a `Config`."""
    return TOP.of(config).align


def wanted(config: Any) -> bool:
    return align_of(config).prompts is not None or align_of(config).environment is not None


def _known(name: str, shipped: dict[str, str]) -> str | None:
    """The rule that the name of a function breaks, or None."""
    if name in shipped:
        if name == "math" and find_spec(MATH_VERIFY) is None:
            return "must have the package math-verify, which is not installed (pip install math-verify)"
        return None
    if not PATH.fullmatch(name):
        return f"must be one of {', '.join(shipped)}, or an import path (package.module:name)"
    try:
        missing = find_spec(name.partition(":")[0]) is None
    except Exception:  # of a package that is imported for it
        missing = True
    return f"must be a function that Python finds, and there is no module {name.partition(':')[0]}" if missing else None


def there_are_problems_and_rewards(context: RuleContext) -> Iterator[Problem]:
    own = align_of(context.config)
    if own.prompts is not None and own.environment is not None:
        yield context.problem("align.prompts", "align.environment", rule="must not both be given", fix="remove one")
    if own.environment is not None and (wrong := _known(own.environment, ENVIRONMENTS)):
        yield context.problem("align.environment", rule=wrong, fix="correct the name, or set PYTHONPATH")
    for number, each in enumerate(own.rewards):
        if wrong := _known(each.type, REWARDS):
            yield context.problem(f"align.rewards.{number}.type", rule=wrong, fix="correct the name, or set PYTHONPATH")
    if not own.rewards:
        yield context.problem(
            "align.rewards", rule="must have a reward", fix="use [{type: exact}], which compares with `answer`"
        )
    if len(own.difficulty) != 2 or not 1 <= own.difficulty[0] <= own.difficulty[-1]:
        yield context.problem(
            "align.difficulty", rule="must be two numbers of at least 1 in order, such as [1, 3]", fix="correct them"
        )
    if own.curriculum is not None and (own.environment is None or own.difficulty[0] == own.difficulty[-1]):
        yield context.problem(
            "align.curriculum align.difficulty",
            rule="must come with align.environment and two difficulties",
            fix="use align.difficulty=[1, 5], or remove it",
        )
    if not all(word in own.aggregate.template for word in ("{tails}", "{problem}")):
        yield context.problem(
            "align.aggregate.template", rule="must have {tails} and {problem}", fix='use "{tails}\\n{problem}"'
        )
    if own.stop == "":
        yield context.problem("align.stop", rule="must not be empty", fix="remove it, or give a text")
    unread = {
        "align.held_out": (own.held_out is not None, "align.evaluate", own.evaluate is not None),
        "align.prompt_labels": (own.prompt_labels is not None, "align.prompts", own.prompts is not None),
        "align.held_out_labels": (own.held_out_labels is not None, "align.held_out", own.held_out is not None),
        "align.votes": (own.votes > 0, "align.evaluate", own.evaluate is not None),
        "align.vote_on": (own.vote_on != "text", "align.votes", own.votes > 0),
        "align.aggregate": (own.aggregate != AggregateSection(), "align.votes", own.votes > 0),
        "align.template": (own.template is not None, "align.prompts", own.environment is None),
        "align.difficulty": (own.difficulty != [1, 1], "align.environment", own.environment is not None),
    }
    if own.environment is not None:
        unread["align.held_out"] = (own.held_out is not None, "align.prompts", False)
    for name, (given, needs, there) in unread.items():
        if given and not there:
            yield context.problem(name, needs, rule=f"must come with {needs}, and is not read here", fix="remove it")
    if own.evaluate is not None and own.environment is None and own.held_out is None:
        yield context.problem(
            "align.held_out align.evaluate", rule="must be a file of prompts", fix="give one, or remove align.evaluate"
        )


def rounds_are_whole(context: RuleContext) -> Iterator[Problem]:
    own, training = align_of(context.config), context.config.training
    if training.global_batch_size is None:
        return  # it follows from the number of ranks
    size = training.global_batch_size * own.updates
    if size % own.group:
        yield context.problem(
            "align.group training.global_batch_size align.updates",
            rule=f"must divide the {size} completions of a round (training.global_batch_size * align.updates)",
            fix="change one of them",
        )
    if own.group < 2 and own.advantage != "reward":
        yield context.problem(
            "align.group align.advantage",
            rule="must be at least 2: an advantage compares completions of one prompt",
            fix="use align.group=8, or align.advantage=reward",
        )
    if own.tokens >= training.sequence_length:
        yield context.problem(
            "align.tokens training.sequence_length",
            rule=f"must leave room for a prompt in training.sequence_length = {training.sequence_length}",
            fix="use a smaller one, or longer samples",
        )


def server_key(name: str | None) -> str | None:
    """The key that the server wants, from this environment variable. No message has it.

    Raises:
        UserError: the variable is not set, or no header can have its value.
    """
    if name is None:
        return None
    found = os.environ.get(name, "").strip()
    if not re.fullmatch(r"[!-~]+", found):
        raise UserError(
            f"align.server.key_variable: {name} must have a key of visible ASCII characters on rank 0. Export it "
            "where the run starts, with launch.forward for other hosts, or use launch.environment_file"
        )
    return found


def routes_are_the_decoders(context: RuleContext) -> Iterator[Problem]:
    """Routes of the sampler are of the weights that an update changes, as the decoder's passes had them."""
    from megatron.decoding.covered import obstacle

    config, own = context.config, align_of(context.config)
    if own.routes != "sampler":
        return
    fits = {
        "objective.options": (bool(config.objective.options.get("replay")), "replay: true"),
        "align.server.url": (own.server.url is None, "null"),
        "align.updates": (own.updates == 1, "1"),
        "align.behind": (own.behind == 0, "0"),
    }
    for name, (fit, needs) in fits.items():
        if not fit:
            yield context.problem(
                name, "align.routes", rule=f"must be {needs} with routes: sampler", fix="use align.routes=trainer"
            )
    if (reason := obstacle(config)) is not None:
        yield context.problem(
            "align.routes model.layers",
            rule=f"must be trainer where the decoder does not read texts: {reason}",
            fix="use align.routes=trainer",
        )


def the_run_fits(context: RuleContext) -> Iterator[Problem]:
    """Keys that must have one value, and that a run without rollouts may have otherwise."""
    config = context.config
    needed: dict[str, tuple[Any, Any, str]] = {
        "objective.type": (config.objective.type, POLICY, "the rounds have advantages"),
        "data.synthetic": (config.data.synthetic, ROLLOUTS, "samples come from the rounds"),
        "training.batch_schedule": (list(config.training.batch_schedule), [], "all rounds have one size"),
        "model.dropout": (config.model.dropout, 0.0, "ratios of probabilities must be 1 at first"),
        "adapter.dropout": (
            context.option("adapter.dropout") or 0.0,
            0.0,
            "ratios of probabilities must be 1 at first",
        ),
        "checkpoint.prove": (config.checkpoint.prove, False, "the next batch is not drawn when a checkpoint is saved"),
    }
    for name, (value, needs, why) in needed.items():
        if value != needs:
            shown = str(needs).lower()
            yield context.problem(name, rule=f"must be {shown} with align: {why}", fix=f"use {name}={shown}")
    server = align_of(config).server
    if server.url is None and server != ServerSection():
        yield context.problem("align.server", rule="must come with align.server.url", fix="give it, or remove the rest")
    if server.url is not None and not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", server.url):
        yield context.problem(
            "align.server.url", rule="must be an address of http", fix="use one such as http://localhost:8000"
        )
    if server.key_variable is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", server.key_variable):
        name = "align.server.key_variable"  # its value may be the key, and is not shown
        yield Problem(
            name,
            rule="must be the name of an environment variable, not the key itself",
            fix="export the key as DEEPY_SERVER_KEY, and give that name",
            where=str(context.origin(("align", "server", "key_variable"))).partition("=")[0],
        )
    if server.url is not None and context.option("adapter.type") not in (None, "none"):
        yield context.problem(
            "adapter.type align.server.url",
            rule="must be none with a server, which gets whole weights",
            fix="use adapter.type=none, or remove align.server",
        )
    if config.tokenizer.type == "none":
        yield context.problem(
            "tokenizer.type", rule="must be a tokenizer: prompts and completions are texts", fix="give tokenizer.path"
        )
    if config.evaluation.every is not None or config.evaluation.at_start or config.evaluation.at_end:
        yield context.problem(
            "evaluation.every evaluation.at_end",
            rule="must be off with align, which evaluates on held-out problems",
            fix="use evaluation.at_end=false, and align.evaluate",
        )
    if "rollback" in (context.option("spikes.action"), context.option("spikes.non_finite")):
        yield context.problem(
            "spikes.action", rule="must not be rollback with align: rounds cannot be skipped", fix="use skip or stop"
        )
    kind = optimizer_kind(config)
    if kind is not None and kind.averages:
        yield context.problem(
            "optimizer.type",
            rule="must be an optimizer that evaluates the weights that it trains: this one evaluates an average",
            fix="use optimizer.type=adamw",
        )
    if config.objective.options.get("beta") and config.training.weight_average is None:
        yield context.problem(
            "training.weight_average objective.options",
            rule="must be given with beta: the average of the weights is the reference, and with 1 they are the first",
            fix="use training.weight_average=1, or remove beta",
        )


def keys_have_a_use(context: RuleContext) -> Iterator[Problem]:
    if wanted(context.config):
        return
    if align_of(context.config) != AlignSection():
        yield context.problem(
            "align", rule="must come with align.prompts or align.environment", fix="give one of them, or remove it"
        )
    if context.config.data.synthetic == ROLLOUTS:
        yield context.problem(
            "data.synthetic",
            rule="must not be rollouts without align.prompts or align.environment",
            fix="give one of them",
        )


FEATURE = Feature(
    about="Reinforcement learning: draws texts, rewards them, and trains on them.",
    wanted=wanted,
    keys=(TOP,),
    rules=(
        *only_where(wanted, (there_are_problems_and_rewards, rounds_are_whole, the_run_fits, routes_are_the_decoders)),
        keys_have_a_use,
    ),
    hook="megatron.features.align.hook:AlignHook",
    hook_before=("log",),
)
