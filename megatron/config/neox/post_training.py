"""GPT-NeoX's keys of preferences, reward models and REINFORCE. It pairs documents of two files by number too."""

from typing import Any

from .reader import Flat, Native

SETS = {"train": "", "valid": "validation"}
PATHS = [
    f"{sign}{name}_{kind}data_paths"
    for sign, kinds in (("", ("reward_",)), ("pos_", ("", "label_")), ("neg_", ("", "label_")))
    for name in ("train", "valid", "test")
    for kind in kinds
]
# Key -> GPT-NeoX's default.
KEYS: dict[str, Any] = {
    "train_impl": "normal",
    "dataset_impl": "gpt2",
    "dpo_fp32": True,
    "dpo_reference_free": False,
    "dpo_beta": 0.1,
    "kto_fp32": True,
    "kto_beta": 0.1,
    "kto_desirable_weight": 1.0,
    "kto_undesirable_weight": 1.0,
    "z_loss": 0.0,
    "fp32_reinforce": True,
    "kl_impl": "mse",
    "kl_div_beta": 0.1,
    "reinforce_leave_one_out": False,
    "online_dataserver_ips": "localhost",
    "online_dataserver_ports": 10000,
    "serve_model_weights": False,
    **dict.fromkeys(PATHS),
}
OBJECTIVES = {"dpo": "dpo", "rm": "reward_model", "kto": "kto", "reinforce": "policy"}
SOURCES = {"dpo": "pairs", "reward_model": "reward_pairs", "kto": "rated", "policy": "rollouts"}
KL = {"abs": "abs", "mse": "k2", "kl": "k1"}
ONLINE = ("reinforce_leave_one_out", "kl_impl", "kl_div_beta", "eval_interval")
REFERENCE = "deepy data reference --model CHECKPOINT --input"


def trained(flat: Flat) -> str:
    """The word of `train_impl`, in small letters."""
    return str(flat.raw("train_impl")).lower()


def translate(flat: Flat, native: Native) -> None:
    """Translate the objective and its files. Files of plain training are read by `corpus`."""
    found = flat.choice("train_impl", {"normal": "", **OBJECTIVES})
    pairwise = found in ("dpo", "reward_model")
    needed = "online" if found == "policy" else "pairwise" if pairwise else "gpt2"
    flat.choice("dataset_impl", {needed: True}, {"online": "set train_impl: reinforce"})
    native.unused("at the value that train_impl needs", "train_impl", "dataset_impl")
    native.unused("log-probabilities are summed in fp32 at least", "dpo_fp32", "kto_fp32", "fp32_reinforce")
    native.unused("train_impl does not read it", *(name for name in KEYS if not _reads(name, found)))
    if not found:
        for name in PATHS if found is not None else ():
            if flat.raw(name):
                kinds = "kto" if "reward" in name else "dpo or rm"
                flat.problem(name, f"{name} must come with train_impl: {kinds}", "remove it, or set train_impl")
        return
    native.put("objective.type", found, "train_impl")
    native.put("data.synthetic", SOURCES[found], "train_impl")
    native.put("data.reset_attention_at_eod", True, "train_impl")
    if found == "policy":
        _policy(flat, native)
        return
    native.put("data.options", _files(flat, native, found), *(name for name in _read_paths(found) if flat.given(name)))
    if pairwise and (length := flat.count("seq_length")):
        native.put("training.sequence_length", 2 * length, "seq_length", "train_impl")
        if str(flat.raw("pos_emb")).lower() != "learned":  # a learned table keeps the size that checkpoints have
            most = max(2 * length, flat.count("max_position_embeddings") or 0)
            native.put("model.embedding.max_positions", most, "max_position_embeddings", "train_impl")
        native.note("training.sequence_length: both answers of a pair are in one sample, each in a half")
    if found == "dpo":
        native.put("objective.options.beta", flat.number("dpo_beta"), "dpo_beta")
        native.put("objective.options.reference_free", flat.boolean("dpo_reference_free"), "dpo_reference_free")
    elif found == "kto":
        _kto(flat, native)
    else:
        native.put("objective.options.squares", flat.number("z_loss"), "z_loss")
    native.note("answers are read whole: GPT-NeoX appends the first token of the next document, with its label")


def _reads(name: str, found: str | None) -> bool:
    word = {"reward_model": "z_loss"}.get(found or "", f"{found}_")
    if found == "policy" and name in ONLINE:
        return True
    return name in ("train_impl", "dataset_impl", *_read_paths(found or "")) or (bool(found) and name.startswith(word))


def _read_paths(found: str) -> list[str]:
    if found in ("kto", "policy"):
        kinds = ("", "label_", "reward_") if found == "kto" else ("", "label_")
        return [f"{name}_{kind}data_paths" for name in ("train", "valid", "test") for kind in kinds]
    return [name for name in PATHS if name.startswith(("pos_", "neg_"))] if found else []


def _files(flat: Flat, native: Native, found: str) -> dict[str, Any]:
    sides = {"": "answers"} if found == "kto" else {"pos_": "chosen", "neg_": "rejected"}
    options: dict[str, Any] = {}
    for name, section in SETS.items():
        part: dict[str, Any] = {}
        for sign, side in sides.items():
            part[side] = _one(flat, f"{sign}{name}_data_paths", needed=name == "train")
            part[f"{side}_labels"] = _one(flat, f"{sign}{name}_label_data_paths", needed=name == "train")
            if name == "train" and found != "reward_model" and not flat.boolean("dpo_reference_free"):
                part[f"{side}_reference"] = f"{part[side]}_reference.npy"
        if found == "kto" and name == "train":
            part["rewards"] = _one(flat, "train_reward_data_paths", needed=True)
        part = {key: value for key, value in part.items() if value is not None}
        options |= {section: part} if section and part else part
    native.unused("the test set is not scored", *(name for name in _read_paths(found) if "test_" in name))
    native.unused("evaluations report cross-entropies", "valid_reward_data_paths")
    recorded = [part[: -len("_reference.npy")] for key, part in options.items() if key.endswith("_reference")]
    if recorded:
        native.note(
            "the reference's log-probabilities are files, where GPT-NeoX has a second model: "
            f"{REFERENCE} {' '.join(recorded)} records them"
        )
    return options


def _one(flat: Flat, name: str, needed: bool) -> str | None:
    paths = flat.items(name)
    if paths and len(paths) == 1 and isinstance(paths[0], str):
        return paths[0]
    if paths or needed:
        rule = f"{name} must be a list of one prefix of a .bin/.idx pair"
        flat.problem(name, rule, "join several files in one order by deepy data merge" if paths else f"add {name}")
    return None


def _kto(flat: Flat, native: Native) -> None:
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        native.put(f"objective.options.{name}", flat.number(f"kto_{name}"), f"kto_{name}")
    native.put("objective.options.kl", False, "train_impl")
    native.note(
        "objective.options.kl: false: GPT-NeoX subtracts a divergence of the same answers, of half a micro-batch on "
        "one rank, and averages each reward over the filler too. kl: true measures it over the whole batch "
        "(docs/preferences.md)"
    )


def _policy(flat: Flat, native: Native) -> None:
    """Prompts are the conversations of its files, up to the first label. Its sampler and its rewards are a server."""
    native.put("objective.options.loss", "reinforce", "train_impl")
    beta, kind = flat.defaulted_number("kl_div_beta"), flat.choice("kl_impl", KL, {"full": "take mse, kl or abs"})
    native.put("objective.options.beta", beta, "kl_div_beta")
    if beta:
        native.put("objective.options.kl", kind, "kl_impl")
        native.put("training.weight_average", 1.0, "kl_div_beta")
    native.unused("kl_div_beta is 0", *([] if beta else ["kl_impl"]))
    native.put("align.advantage", "leave_one_out", "reinforce_leave_one_out")
    judged = flat.given("valid_data_paths") and bool(flat.integer("eval_iters"))
    for name, key in (("train", "prompt"), ("valid", "held_out")) if judged else (("train", "prompt"),):
        paths, labels = f"{name}_data_paths", f"{name}_label_data_paths"
        native.put(f"align.{key.replace('prompt', 'prompts')}", _one(flat, paths, needed=True), paths)
        native.put(f"align.{key}_labels", _one(flat, labels, needed=True), labels)
    if judged:
        native.put("align.evaluate", flat.count("eval_interval"), "eval_interval")
    native.unused("the test set is not scored", *(name for name in _read_paths("policy") if "test_" in name))
    native.unused(
        "there is no evaluation", *(name for name in _read_paths("policy") if "valid_" in name and not judged)
    )
    native.unused(
        "the trainer's ranks draw completions",
        *("online_dataserver_ips", "online_dataserver_ports", "serve_model_weights"),
    )
    native.note(
        "align.rewards must be given: GPT-NeoX gets completions and rewards from a server of your own, by pickle. Here "
        "align.rewards judges texts, and align.group and align.tokens say how many and how long they are"
    )
    if not flat.boolean("reinforce_leave_one_out"):
        native.note(
            "align.advantage: leave_one_out: GPT-NeoX subtracts the mean of the last 100 groups of one rank, which a "
            "restart forgets"
        )
    native.note(
        "objective.options.mean: label: over the whole step. GPT-NeoX divides by the labels of a micro-batch and then "
        "by its number of texts"
    )
