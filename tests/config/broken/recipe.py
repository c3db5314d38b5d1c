"""Recipes, schedules, data and checkpoints that cannot be."""

from tests.config.broken.case import case

RECIPE = [
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

LAUNCH = [
    case(
        "interpreter missing",
        "launch: {python: /opt/none/bin/python}",
        "a.yml:2: launch.python = '/opt/none/bin/python'",
        "must be a program that can be started",
    ),
    case(
        "folder to start in missing",
        "launch: {working_directory: /nowhere/at/all}",
        "a.yml:2: launch.working_directory = '/nowhere/at/all'",
        "must be a folder that exists",
    ),
    case(
        "name of a variable with an equals sign",
        "launch:\n  environment: {A=B: x}",
        "a.yml:3: launch.environment.A=B",
        "must not be empty, nor have '=' or a NUL",
    ),
    case(
        "NUL in a variable",
        'launch:\n  environment: {A: "x\\0y"}',
        "a.yml:3: launch.environment.A",
        "values of variables must not have a NUL",
    ),
    case("no GPU", "launch: {device: cuda}", "a.yml:2: launch.device = 'cuda'", "must have an NVIDIA or AMD GPU"),
    case(
        "hosts in and out",
        "launch: {include: a, exclude: b}",
        "a.yml:2: launch.exclude = 'b'",
        "launch.include = 'a' (a.yml:2)",
        "keep one of them",
    ),
    case(
        "secrets",
        "launch:\n  environment: {TOKENIZERS_PARALLELISM: '1', HF_TOKEN: x1}",
        "a.yml:3: launch.environment.HF_TOKEN\n    rule",
        "put it into a file that launch.environment_file names",
    ),
    case("line break in a name", 'run: {name: "a\\nb", dir: runs/x}', "run.name", "without line breaks", "remove them"),
    case(
        "no image",
        "launch: {container: apptainer, python: python3}",
        "launch.container = 'apptainer'",
        "must be TOOL:IMAGE",
    ),
    case("two words", "launch:\n  batch: {account: a b}", "launch.batch.account = 'a b'", "must be one word"),
    case("no resource", "launch:\n  batch: {resources: {a b: 1}}", "launch.batch.resources", "such as rdma/hca"),
    case("ssh without hosts", "launch: {runner: ssh}", "a.yml:2: launch.runner = 'ssh'", "give launch.hostfile"),
    case(
        "hosts of the local runner",
        "launch:\n  runner: local\n  hostfile: half.bin",
        "a.yml:4: launch.hostfile = 'half.bin'",
        "this machine only",
    ),
    case(
        "hostfile missing", "launch: {hostfile: hosts}", "a.yml:2: launch.hostfile = 'hosts'", "there is no file hosts"
    ),
]

OUTPUT = [
    case(
        "run inside a file",
        "run: {dir: whole.bin/run}",
        "a.yml:2: run.dir = 'whole.bin/run'",
        "must be a folder that the run can write into",
        "whole.bin is not a folder",
    ),
    case("checkpoints inside a file", "checkpoint: {dir: whole.bin}", "a.yml:2: checkpoint.dir", "is not a folder"),
    case(
        "resume missing",
        "checkpoint: {resume: runs/old}",
        "a.yml:2: checkpoint.resume = 'runs/old'",
        "there is no checkpoint runs/old",
    ),
    case(
        "a protocol that nothing speaks",
        "checkpoint: {upload: 'nosuch://bucket/run'}",
        "a.yml:2: checkpoint.upload = 'nosuch://bucket/run'",
        "Protocol not known: nosuch",
        "s3:// s3fs",
    ),
    case(
        "GPT-NeoX's folder to save into",
        "checkpoint: {dir: neox}",
        "a.yml:2: checkpoint.dir = 'neox'",
        "must not hold GPT-NeoX checkpoints: neox has global_step20",
        "tools/checkpoint/from_neox.py neox/global_step20",
    ),
    case(
        "no source counts",
        "data:\n  synthetic: none\n  train: [{path: whole, loss: false}]\n"
        "  validation: {v: [{path: whole, loss: false}]}",
        "a.yml:4: data.train.0.loss = false",
        "a.yml:5: data.validation.v.0.loss = false",
        "at least one source must count in the loss",
        problems=2,
    ),
    case("resume: no", "checkpoint: {resume: no}", "a.yml:2: checkpoint.resume = 'no'", "write none to start anew"),
    case(
        "weights missing",
        "checkpoint: {initialize_from: hf/model}",
        "checkpoint.initialize_from = 'hf/model'",
        "there is no checkpoint or folder",
    ),
    case(
        "resumed and initialised",
        "checkpoint: {initialize_from: ., resume: ./}",
        "a.yml:2: checkpoint.initialize_from = '.'",
        "not both",
    ),
    case("negative step", "checkpoint: {steps: [-1]}", "steps must be at least 0"),
    case(
        "profile of a rank that is not there",
        "logging: {profile: {start: 2, ranks: [2]}}",
        "ranks of the run, 0 to 1, and 2 is not",
    ),
    case(
        "rollback without checkpoints",
        "spikes: {action: rollback}",
        "a.yml:2: spikes.action = 'rollback'",
        "must have checkpoints to go back to",
        "give checkpoint.every",
    ),
    case(
        "rollback to weights alone",
        "spikes: {non_finite: rollback}\ncheckpoint: {every: 10, optimizer_state: false}",
        "a.yml:2: spikes.non_finite = 'rollback'",
        "checkpoint.optimizer_state = false (a.yml:3)",
        "must have checkpoints that can be resumed",
    ),
    case(
        "checkpoints that are gone when a rollback needs them",
        "spikes: {action: rollback}\ncheckpoint: {every: 10, keep_last: 3}",
        "a.yml:3: checkpoint.keep_last = 3",
        "must be at least 11",
        "spikes.back of at most 20",
    ),
    case(
        "a rollback that does not reach the spike",
        "spikes: {action: rollback, back: 300}\ncheckpoint: {every: 10}",
        "spikes.leave_out = 200",
        "spikes.back = 300 (a.yml:2)",
        "leave_out must be above back",
        "use spikes.leave_out=600",
    ),
    case(
        "clipping that looks at the loss",
        "spikes: {action: clip, watch: loss}",
        "a.yml:2: spikes.watch = 'loss'",
        "clip must watch the gradient norm",
    ),
    case(
        "hashes of what is offloaded",
        "training: {hashes: 10}\nzero: {stage: 2, offload_optimizer: {device: cpu}}",
        "a.yml:2: training.hashes = 10",
        "zero.offload_optimizer.device = 'cpu' (a.yml:3)",
        "must be off with offloading",
    ),
    case(
        "confirmation of spikes about which nothing is done",
        "spikes: {confirm: true, action: report}",
        "a.yml:2: spikes.confirm = true",
        "confirm must go with skip or rollback",
    ),
]
