"""Unknown keys, wrong types, values out of range, and files that cannot be read."""

from tests.config.broken.case import case

KEYS = [
    case(
        "key unknown, near one beside it",
        "model: {attention: {head: 4}}",
        "a.yml:2: model.attention.head = 4",
        "unknown key in model.attention",
        "did you mean model.attention.heads or model.head",
    ),
    case(
        "key unknown, in another section",
        "training:\n  gradient_clipping: 1.0",
        "a.yml:3: training.gradient_clipping = 1.0",
        "did you mean optimizer.gradient_clipping?",
    ),
    case(
        "key unknown, at the top",
        "global_batch_size: 4",
        "a.yml:2: global_batch_size = 4",
        "unknown key in the configuration",
        "did you mean training.global_batch_size?",
    ),
    case(
        "key unknown, another word for it",
        "optimizer: {learning_rate: 0.1}",
        "a.yml:2: optimizer.learning_rate = 0.1",
        "unknown key in optimizer",
        "did you mean optimizer.lr?",
    ),
    case("section unknown", "modle: {hidden_size: 4}", "a.yml:2: modle", "did you mean model?"),
    case(
        "dotted key in a file", "training.steps: 5", "a.yml:2: training.steps = 5", "nest it: `training: {steps: ...}`"
    ),
    case(
        "role unknown",
        "optimizer: {groups: {nrom: {weight_decay: 0.0}}}",
        "a.yml:2: optimizer.groups.nrom",
        "the names in optimizer.groups must be among embedding, position,",
        "did you mean norm?",
    ),
    case(
        "option of a source unknown",
        "data:\n  synthetic: none\n  train:\n    - path: x\n      wieght: 2.0",
        "a.yml:6: data.train.0.wieght = 2.0",
        "did you mean data.train.0.weight?",
        "no file x.bin",
        problems=2,
    ),
    case(
        "option of a variant's rotary unknown",
        "model: {layers: attention@a/mlp x4, variants: {a: {rotary: {frction: 0.5}}}}",
        "a.yml:2: model.variants.a.rotary.frction = 0.5",
        "did you mean model.variants.a.rotary.fraction?",
        "(an option of attention)",
    ),
    case(
        "option of a variant's router unknown",
        "model: {layers: attention/moe@a x4, moe: {experts: 4}, variants: {a: {router: {jiter: 0.1}}}}",
        "a.yml:2: model.variants.a.router.jiter = 0.1",
        "did you mean model.variants.a.router.jitter?",
    ),
    case(
        "source without a path",
        "data: {synthetic: none, train: [{weight: 1.0}]}",
        "a.yml:2: data.train.0.path",
        "data.train.0.path is required",
    ),
    case(
        "required key taken back",
        "model: {hidden_size: null}",
        "model.hidden_size is required",
        "Width of the residual",
    ),
]

TYPES = [
    case(
        "text for a number",
        'training: {steps: "100"}',
        "a.yml:2: training.steps = '100'",
        "must be a whole number",
        "write 100 (without quotes",
    ),
    case(
        "exponent for a whole number",
        "training: {steps: 1e3}",
        "a.yml:2: training.steps = 1000.0",
        "must be a whole number",
        "write 1000, without a point",
    ),
    case(
        "fraction for a whole number", "model: {hidden_size: 64.5}", "a.yml:2: model.hidden_size = 64.5", "round it: 64"
    ),
    case("underscores", "model: {hidden_size: 1_024}", "'1_024'", "write 1024 (without quotes, commas or underscores)"),
    case("commas", 'zero: {bucket_size: "500,000,000"}', "zero.bucket_size", "write 500000000"),
    case("sexagesimal", "training: {stop_after: 1:30}", "a.yml:2: training.stop_after = '1:30'", "base 60"),
    case(
        "yes",
        "training: {deterministic: yes}",
        "a.yml:2: training.deterministic = 'yes'",
        "must be true or false",
        "write true ('yes' is text)",
    ),
    case("off", "logging: {tensorboard: off}", "a.yml:2: logging.tensorboard = 'off'", "write false ('off' is text)"),
    case("number for true", "model: {embedding: {tied: 1}}", "model.embedding.tied = 1", "must be true or false"),
    case(
        "number for text",
        "run: {name: 7}",
        "a.yml:2: run.name = 7",
        "run.name must be text",
        'put it in quotes if text is meant: "7"',
    ),
    case("false for a choice", "logging: {wandb: {mode: false}}", "logging.wandb.mode = false", "write disabled"),
    case(
        "choice misspelt",
        "optimizer: {type: adamW2}",
        "a.yml:2: optimizer.type = 'adamW2'",
        "must be one of adamw, lion, sgd, muon, normuon, dion, soap, adafactor, adamw_8bit, ademamix, ",
        "did you mean adamw?",
    ),
    case(
        "objective misspelt",
        "objective: {type: crossentropy}",
        "a.yml:2: objective.type = 'crossentropy'",
        "objective.type must be one of cross_entropy",
        "did you mean cross_entropy?",
    ),
    case("choice unknown", "precision: fp8", "a.yml:2: precision.compute = 'fp8'", "must be one of fp32, bf16, fp16"),
    case(
        "scalar for a section",
        "model: {norm: rmsnorm}",
        "a.yml:2: model.norm = 'rmsnorm'",
        "must be a mapping with the keys type, epsilon, bias",
        "indent its keys below norm:",
    ),
    case("list for a section", "zero: [1]", "a.yml:2: zero = [1]", "must be a mapping with the keys stage"),
    case(
        "pair with one number",
        "optimizer: {betas: [0.9]}",
        "optimizer.betas = [0.9]",
        "must be a list of 2 numbers",
        "as in [0.9, 0.95]",
    ),
    case(
        "text in a list",
        "checkpoint: {steps: [1, two]}",
        "a.yml:2: checkpoint.steps.1 = 'two'",
        "must be a whole number",
    ),
    case("list for text", "run: {notes: [a]}", "run.notes = ['a']", "run.notes must be text"),
]

RANGES = [
    case(
        "zero heads",
        "model: {attention: {heads: 0}}",
        "a.yml:2: model.attention.heads = 0",
        "above 0",
        "give at least 1",
    ),
    case(
        "negative rate", "optimizer: {lr: -1e-3}", "optimizer.lr = -0.001", "a number in [0, 1000]", "give at least 0"
    ),
    case("dropout of one", "model: {dropout: 1.0}", "model.dropout = 1.0", "a number in [0, 1)", "give less than 1"),
    case(
        "share above one", "schedule: {min_lr_ratio: 10}", "schedule.min_lr_ratio = 10", "in [0, 1]", "give at most 1"
    ),
    case("ZeRO stage 4", "zero: {stage: 4}", "zero.stage = 4", "one of 0, 1, 2, 3"),
    case("infinity", "optimizer: {lr: .inf}", "optimizer.lr = inf", "give a finite number"),
    case("not a number", "model: {init: {std: .nan}}", "model.init.std = nan", "give a finite number"),
    case("port too large", "launch: {master_port: 70000}", "launch.master_port = 70000", "give at most 65535"),
    case(
        "packing in the pythia order",
        "data: {synthetic: none, train: whole, packing: best_fit}",
        "a.yml:2: data.packing = 'best_fit'",
        "must not go with the pythia order",
        "data.order: stream",
    ),
    case(
        "empty phase",
        "data: {phases: [{start: 0, sources: []}]}",
        "data.phases.0.sources = []",
        "not empty",
        problems=1,
    ),
]

YAML = [
    case(
        "key twice", "zero:\n  stage: 1\n  stage: 2", "a.yml:4: zero.stage", "given twice, in lines 3 and 4", "keep one"
    ),
    case("section twice", "zero: {stage: 1}\nrun: {name: x}\nzero: {overlap: true}", "a.yml:4: zero", "lines 2 and 4"),
    case("tab", "zero:\n\tstage: 1", "a.yml:3", "there is a tab", "replace the tab with spaces"),
    case("octal", "training: {seed: 0123}", "a.yml:2: training.seed", "leading zero", "write 123, or 0o123 for octal"),
    case("bracket never closed", "zero: {stage: 1", "a.yml:", "this is not YAML", "check brackets"),
    case("two documents", "zero: {stage: 1}\n---\nrun: {name: x}", "a.yml:3", "one YAML document"),
    case("merge key", "model: &m {dropout: 0.1}\nzero: {<<: *m}", "a.yml:3: zero.<<", "no merge key"),
    case("tag", "run: {name: !!python/name:os.system x}", "a.yml:2: run.name", "has no meaning here", "remove the tag"),
    case(
        "alias inside its anchor", "deepspeed: &d {x: *d}", "a.yml:2: deepspeed.x", "cannot stand inside its own anchor"
    ),
    case("colon in a text", "run:\n  notes: a: b", "a.yml:3", "a ':' where no key can stand"),
    case("base missing", "zero: {stage: 1}", "there is no file", "nothing.yml", "extends", arguments=("other.yml",)),
    case(
        "bases in a circle",
        "zero: {stage: 1}",
        "extend each other in a circle: circle.yml -> circle.yml",
        arguments=("circle.yml",),
    ),
    case(
        "an override without a value",
        "zero: {stage: 1}",
        "there is no such file",
        "write optimizer.lr=VALUE",
        arguments=("optimizer.lr",),
    ),
    case(
        "a ready configuration misspelt",
        "zero: {stage: 1}",
        "pythia/70n",
        "did you mean pythia/70m?",
        arguments=("pythia/70n",),
    ),
    case("no such file", "zero: {stage: 1}", "absent.yml", "there is no such file", arguments=("absent.yml",)),
    case(
        "override of an unknown key",
        "zero: {stage: 1}",
        "argument training.stepps=5: training.stepps = 5",
        "did you mean training.steps?",
        arguments=("training.stepps=5",),
    ),
    case("override without a key", "zero: {stage: 1}", "neither a YAML file nor key.path=value", arguments=("=5",)),
]
