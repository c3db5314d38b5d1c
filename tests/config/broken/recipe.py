"""Recipes, schedules and data that cannot be."""

from tests.config.broken.case import case

RECIPE = [
    case("goldfish without its type", "objective: {k: 3}", "a.yml:2: objective.k = 3", "with objective.type: goldfish"),
    case("goldfish leaves all out", "objective: {type: goldfish, k: 1}", "a.yml:2: objective.k = 1", "[2, "),
    case(
        "goldfish looks beyond the sample",
        "objective: {type: goldfish, h: 33}",
        "a.yml:2: objective.h = 33",
        "training.sequence_length = 32 (base.yml:8)",
        "must be at most the 32 tokens",
    ),
    case(
        "goldfish without an end of documents",
        "objective: {type: goldfish}\ndata: {train: whole, synthetic: none}",
        "a.yml:2: objective.type = 'goldfish'",
        "the end-of-document token must be known",
    ),
    case(
        "distillation without a teacher",
        "objective: {type: distillation}",
        "objective.teacher = null",
        "objective.type: distillation must have a teacher",
    ),
    case(
        "a teacher without distillation",
        "objective: {teacher: here}",
        "a.yml:2: objective.teacher = 'here'",
        "objective.teacher must come with objective.type: distillation",
    ),
    case(
        "a teacher that is not there",
        "objective: {type: distillation, teacher: runs/nowhere}",
        "a.yml:2: objective.teacher = 'runs/nowhere'",
        "there is no folder runs/nowhere",
    ),
    case(
        "a teacher of other words",
        "objective: {type: distillation, teacher: other_words}",
        "base.yml:4: model.vocab_size = 128",
        "objective.teacher = 'other_words' (a.yml:2)",
        "must be the teacher's, whose embedding has 96 rows",
    ),
    case(
        "a teacher whose heads cannot be shared",
        "objective: {type: distillation, teacher: odd_heads}\nparallel: {tensor: 2}",
        "a.yml:2: objective.teacher = 'odd_heads'",
        "must fit the run's layout and sequences; of the teacher's model.attention.heads",
    ),
    case(
        "a teacher beside further tokens",
        "objective: {type: distillation, teacher: runs/nowhere}\nmodel: {multi_token_prediction: {depth: 1}}",
        "model.multi_token_prediction.depth = 1",
        "which says nothing of tokens further ahead",
        problems=2,
    ),
    case(
        "a teacher beside a pipeline",
        "objective: {type: distillation, teacher: runs/nowhere}\nparallel: {pipeline: 2}",
        "parallel.pipeline = 2",
        "a pipeline hands on the stream of one model, not of two",
        problems=2,
    ),
    case("a run without end", "", "training.steps = 1", "1000000000000]", arguments=(f"training.steps={10**40}",)),
    case("learning rate of 1e30", "optimizer: {lr: 1e30}", "a.yml:2: optimizer.lr = 1e+30", ", 1000]"),
    case(
        "epochs of data that are made",
        "training: {epochs: 2, steps: null}",
        "a.yml:2: training.epochs = 2",
        "must go with token files in data.train",
        "fix:  give training.steps instead",
    ),
    case("epochs beside steps", "training: {epochs: 2}", "a.yml:2: training.epochs = 2", "must go with token files"),
    case("neither steps nor epochs", "training: {steps: null}", "training.steps is required", "or training.epochs"),
    case(
        "batch beyond all numbers",
        f"training: {{global_batch_size: {16 * 10**17}}}",
        "a.yml:2: training.global_batch_size",
        "must be fewer than 2^63",
    ),
    case(
        "batch is no multiple",
        "training: {global_batch_size: 15}",
        "a.yml:2: training.global_batch_size = 15",
        "training.micro_batch_size = 2 (base.yml:9)",
        "a multiple of 2 * 2 = 4",
        "use global_batch_size = 12 or 16",
    ),
    case(
        "batch is no multiple, other micro-batches are",
        "training: {micro_batch_size: 3}",
        "use global_batch_size = 12 or 18, or micro_batch_size = 2",
    ),
    case(
        "batch contradicts accumulation",
        "training: {accumulation: 3}",
        "base.yml:10: training.global_batch_size = 16",
        "training.accumulation = 3 (a.yml:2)",
        "2 * 3 * 2 = 12",
        "use global_batch_size = 12, or leave accumulation out (it would be 4)",
    ),
    case(
        "fp16 on CPU",
        "precision: fp16\nlaunch: {device: cpu}",
        "a.yml:2: precision.compute = 'fp16'",
        "(a.yml:3)",
        "fp16 must be trained on GPUs",
    ),
    case(
        "fp16 without a GPU",
        "precision: fp16",
        "a.yml:2: precision.compute = 'fp16'",
        "and this machine has none",
        "use precision=bf16",
    ),
    case(
        "kernels of a package on CPU",
        "model: {layers: mamba x4, kernels: mamba_ssm}\nlaunch: {device: cpu}",
        "a.yml:2: model.kernels = 'mamba_ssm'",
        "launch.device = 'cpu' (a.yml:3)",
        "mamba_ssm must have a GPU",
    ),
    case(
        "kernels misspelt",
        "model: {kernels: mamba-ssm}",
        "a.yml:2: model.kernels = 'mamba-ssm'",
        "must be one of auto, torch, mamba_ssm, fla",
        "did you mean mamba_ssm?",
    ),
    case(
        "kernels for no layer",
        "model: {kernels: mamba_ssm}",
        "a.yml:2: model.kernels = 'mamba_ssm'",
        "mamba_ssm has kernels for mamba and mamba2: the pattern must have one of these",
        "use kernels: auto",
    ),
    case("bf16 sums of fp32 gradients", "precision: {accumulate: bf16}", "precision.accumulate = 'bf16'", "use fp32"),
    case("beta of one", "optimizer: {betas: [0.9, 1.0]}", "optimizer.betas = [0.9, 1.0]", "in [0, 1)"),
    case(
        "Nesterov without momentum", "optimizer: {type: sgd, nesterov: true, momentum: 0.0}", "must go with a momentum"
    ),
    case(
        "beta of one for a role",
        "optimizer: {groups: {hidden: {betas: [0.9, 1.0]}}}",
        "optimizer.groups.hidden.betas = [0.9, 1.0]",
        "in [0, 1)",
    ),
    case(
        "SOAP with Muon's option",
        "optimizer: {type: soap, options: {momentum: 0.9}}",
        "a.yml:2: optimizer.options",
        "the options of soap must be among frequency, largest, beta; momentum is not",
    ),
    case(
        "a coefficient of one",
        "optimizer: {type: ademamix, options: {slow: 1.0}}",
        "slow must be a number from 0 to below 1",
        "use 0.9999",
    ),
    case(
        "a schedule of what is free of it",
        "optimizer: {type: schedule_free_adamw}",
        "schedule.type = 'cosine'",
        "optimizer.type = 'schedule_free_adamw' (a.yml:2)",
        "schedule_free_adamw must have a constant rate after the warmup",
        "use schedule.type=constant",
    ),
    case(
        "orthogonal heads under muP",
        "model: {parametrization: {type: mup, base_width: 32}}\noptimizer: {type: muon, options: {per_head: true}}",
        "a.yml:3: optimizer.options",
        "are so for muon without per_head",
    ),
    case(
        "a switch that is a number",
        "optimizer: {type: muon, options: {per_head: 1}}",
        "per_head must be true or false",
        "leave it out",
    ),
    case(
        "two averages of the weights, and none that could be told from z",
        "optimizer: {type: schedule_free_adamw, betas: [0.0, 0.95]}\nschedule: {type: constant}",
        "training.weight_average",
        "evaluates and saves an average of the weights already",
        "a.yml:2: optimizer.betas = [0.0, 0.95]",
        "the first must be above 0 with schedule_free_adamw",
        problems=2,
        arguments=("training.weight_average=0.9",),
    ),
    case(
        "Muon without a rate", "optimizer: {type: muon, lr: 0}", "a.yml:2: optimizer.lr = 0.0", "which must be above 0"
    ),
    case(
        "selective recomputation at ZeRO 3",
        "zero: {stage: 3}\ntraining: {activation_checkpointing: {mode: selective}}",
        "a.yml:3: training.activation_checkpointing.mode = 'selective'",
        "zero.stage = 3 (a.yml:2)",
        "use mode: full",
        "1 warning",
    ),
]

SCHEDULE = [
    case(
        "warmup twice",
        "schedule: {warmup_steps: 5, warmup_fraction: 0.1}",
        "a.yml:2: schedule.warmup_fraction = 0.1",
        "schedule.warmup_steps = 5 (a.yml:2)",
        "given in one way",
    ),
    case(
        "warmup longer than the run",
        "schedule: {warmup_steps: 101}",
        "a.yml:2: schedule.warmup_steps = 101",
        "must fit into the 100 steps",
        "schedule.steps = 100",
    ),
    case(
        "warmup in tokens longer than the run",
        "schedule: {warmup_tokens: 1000000}",
        "schedule.warmup_tokens = 1000000",
        "warmup_tokens (1953.12 steps) must fit",
    ),
    case(
        "warmup and decay longer than the run",
        "schedule: {type: wsd, warmup_steps: 60, decay_steps: 50}",
        "a.yml:2: schedule.warmup_steps = 60",
        "warmup_steps 60 + decay_steps 50 must fit into the 100 steps",
    ),
    case("start after the end", "schedule: {start: 100}", "schedule.start = 100", "must be below schedule.steps"),
    case(
        "inverse square root without a warmup",
        "schedule: {type: inverse_sqrt}",
        "inverse_sqrt must have a warmup",
        "give schedule.warmup_steps",
    ),
    case(
        "infinite without its cooldown",
        "schedule: {type: infinite, min_lr_ratio: 0.0}",
        "must have the steps of its cooldown",
        "must be above 0",
        problems=2,
    ),
    case(
        "compat of no schedule of today",
        "schedule: {type: wsd, compat: neox}",
        "must be one that GPT-NeoX has, and it has no wsd schedule",
    ),
    case(
        "compat of another schedule",
        "schedule: {type: wsd, compat: neox-v1}",
        "must be one that GPT-NeoX 1.0 has, and it has no wsd schedule",
    ),
]

DATA = [
    case(
        "nothing to read",
        "data: {synthetic: none}",
        "data.train",
        "must be given: a run needs training data",
        "data.synthetic=copy",
    ),
    case(
        "read and made",
        "data: {train: tokens}",
        "base.yml:11: data.synthetic = 'copy'",
        "data.train = [",
        "must be none when data are read",
        "no file tokens.bin",
        problems=2,
    ),
    case(
        "read in phases and made",
        "data: {phases: [{start: 0, sources: [tokens]}]}",
        "data.phases = [{start: 0, sources: [{path: 'tokens', name: 'tokens'}]}] (a.yml:2)",
        "fix:  remove data.phases, or use data.synthetic=none",
        "no file tokens.bin",
        problems=2,
    ),
    case(
        "files missing",
        "data:\n  synthetic: none\n  train:\n    - {path: some/where, weight: 1.0}",
        "a.yml:5: data.train.0.path = 'some/where'",
        "there is no file some/where.bin and no file some/where.idx",
        "tools/data/tokenize.py",
    ),
    case(
        "index missing",
        "data: {synthetic: none, train: half}",
        "a.yml:2: data.train.0.path = 'half'",
        "there is no file half.idx",
    ),
    case(
        "evaluation without data",
        "data: {synthetic: none, train: tokens}\nevaluation: {every: 10}",
        "a.yml:3: evaluation.every = 10",
        "must have validation data",
        "no file tokens.bin",
        problems=2,
    ),
    case(
        "named set without a source",
        "data: {validation: {web: []}}",
        "a.yml:2: data.validation.web = []",
        "at least one source",
    ),
    case(
        "split of two sources",
        "data: {synthetic: none, train: [half, other], split: [9, 1]}",
        "a.yml:2: data.split = [9.0, 1.0]",
        "one training source",
        problems=3,
    ),
    case(
        "split with a negative share", "data: {split: [-1, 1]}", "data.split", "shares of training, validation and test"
    ),
    case(
        "phases out of order",
        "data: {synthetic: none, phases: [{start: 0, sources: [half]}, {start: 0, sources: [half]}]}",
        "a.yml:2: data.phases.1.start = 0",
        "use more than 0",
        problems=3,
    ),
    case(
        "documents end unknown",
        "data: {reset_attention_at_eod: true}",
        "a.yml:2: data.reset_attention_at_eod = true",
        "end-of-document token must be known",
        "give tokenizer.eod_id",
    ),
    case(
        "label file missing",
        "data:\n  synthetic: none\n  train:\n    - {path: whole, labels: gone}",
        "a.yml:5: data.train.0.labels = 'gone'",
        "no file gone.bin and no file gone.idx",
    ),
    case(
        "labels of documents in pieces",
        "data: {synthetic: none, train: whole, fim: {rate: 0.5}}",
        "a.yml:2: data.fim.rate = 0.5",
        "must have a tokenizer with its special tokens",
    ),
    case(
        "infilling without its tokens",
        "model: {vocab_size: 200}\ndata: "
        "{synthetic: none, train: whole, fim: {rate: 0.5, prefix: <190>, middle: <191>}}\n"
        "tokenizer: {path: tokenizer.json}",
        "default: data.fim.suffix = '<|fim_suffix|>'",
        "tokenizer.path = 'tokenizer.json' (a.yml:4)",
        "must be a token of the tokenizer, which has no token '<|fim_suffix|>'",
        "--special '<|fim_suffix|>'",
    ),
    case(
        "infilling with labels",
        "data: {synthetic: none, train: {path: whole, labels: whole}, fim: {rate: 0.5}}\ntokenizer: {type: bytes}\n"
        "model: {vocab_size: 257}",
        "a.yml:2: data.train.0.labels = 'whole'",
        "data.fim.rate = 0.5 (a.yml:2)",
        "must not go with fill-in-the-middle",
    ),
    case(
        "corruption without a tokenizer",
        "data: {synthetic: none, train: whole, span_corruption: {rate: 0.5}}",
        "a.yml:2: data.span_corruption.rate = 0.5",
        "must have a tokenizer with its sentinels",
    ),
    case(
        "corruption without its sentinels",
        "model: {vocab_size: 200}\ndata: {synthetic: none, train: whole, "
        "span_corruption: {rate: 0.5, sentinel: '<19{}>', sentinels: 11}}\ntokenizer: {path: tokenizer.json}",
        "a.yml:3: data.span_corruption.sentinel = '<19{}>'",
        "it has no token '<1910>'",
        "use sentinels: 10",
    ),
    case(
        "corruption with a sentinel without a number",
        "data: {span_corruption: {sentinel: <extra_id>}}",
        "a.yml:2: data.span_corruption.sentinel = '<extra_id>'",
        "must have {} once",
    ),
    case(
        "corruption with labels",
        "data: {synthetic: none, train: {path: whole, labels: whole}, span_corruption: {rate: 1}}\n"
        "model: {vocab_size: 200}\ntokenizer: {path: tokenizer.json}",
        "a.yml:2: data.train.0.labels = 'whole'",
        "must not go with span corruption",
        arguments=("data.span_corruption.sentinel='<19{}>'", "data.span_corruption.sentinels=10"),
    ),
    case(
        "corruption beside infilling",
        "model: {vocab_size: 200}\ntokenizer: {path: tokenizer.json}\ndata: {synthetic: none, train: whole, "
        "fim: {rate: 0.5, prefix: <190>, middle: <191>, suffix: <192>}, "
        "span_corruption: {rate: 0.5, sentinel: '<19{}>', sentinels: 10}}",
        "a.yml:4: data.span_corruption.rate = 0.5",
        "must not go with fill-in-the-middle",
    ),
    case(
        "corruption of samples that are cut",
        "model: {vocab_size: 200}\ntokenizer: {path: tokenizer.json}\ndata: {synthetic: none, train: whole, "
        "span_corruption: {rate: 0.5, sentinel: '<19{}>', sentinels: 10}}\n"
        "training: {sequence_schedule: [{until: 50, sequence_length: 16}]}",
        "a.yml:4: data.span_corruption.rate = 0.5",
        "must have whole samples",
    ),
    case(
        "corruption of data that are made",
        "data: {span_corruption: {rate: 0.5, sentinel: '<19{}>', sentinels: 10}}\n"
        "model: {vocab_size: 200}\ntokenizer: {path: tokenizer.json}",
        "a.yml:2: data.span_corruption.rate = 0.5",
        "samples that are made have no documents",
    ),
    case(
        "one file twice in a blend",
        "data: {synthetic: none, train: [whole, ./whole.bin]}",
        "a.yml:2: data.train.1.path = './whole.bin'",
        "data.train.0.path = 'whole' (a.yml:2)",
        "with the sum of their weights",
    ),
    case(
        "one file with labels and without",
        "data:\n  synthetic: none\n  train: {path: whole, labels: whole}\n  phases: [{start: 50, sources: [whole]}]",
        "data.phases.0.sources.0.labels = null",
        "data.train.0.labels = 'whole' (a.yml:4)",
        "the same label file in all phases",
    ),
    case(
        "weights of documents that are not there, that differ, and of what is reordered; weights in an evaluation",
        "data:\n  synthetic: none\n  train: {path: whole, document_weights: w.npy}\n"
        "  phases: [{start: 50, sources: [{path: whole, loss_weight: 0}]}]\n"
        "  validation: {v: [{path: whole, loss_weight: 0.5, document_weights: whole.bin}]}\n  fim: {rate: 0.5}\n"
        "tokenizer: {type: bytes}\nmodel: {vocab_size: 257}",
        "a.yml:4: data.train.0.document_weights = 'w.npy'",
        "must exist: there is no file",
        "must not go with fill-in-the-middle, which moves the ends of documents",
        "data.phases.0.sources.0.document_weights = null",
        "whole must have the same document_weights in all phases",
        "a.yml:5: data.phases.0.sources.0.loss_weight = 0",
        "give one of the sources loss: true and a loss_weight above 0",
        "a.yml:6: data.validation.v.0.loss_weight = 0.5",
        "a.yml:6: data.validation.v.0.document_weights = 'whole.bin'",
        "must be left out here: an evaluation weighs all labels alike",
        problems=6,
    ),
    case(
        "seed of the pythia order",
        "training: {seed: 4294967296}\ndata: {synthetic: none, train: whole}",
        "a.yml:2: data.seed = 4294967296",
        "training.seed = 4294967296 (a.yml:2)",
        "below 2**32",
    ),
    case(
        "tokenizer missing",
        "tokenizer: {path: ./missing.json}",
        "a.yml:2: tokenizer.path = './missing.json'",
        "there is no file",
    ),
    case(
        "samples without a prompt",
        "evaluation: {samples: {every: 5}}",
        "samples must have a prompt to continue",
        "must have a tokenizer",
        problems=2,
    ),
]
