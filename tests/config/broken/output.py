"""Launches, checkpoints and outputs that cannot be."""

from tests.config.broken.case import case

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
    *[
        case(f"{name!r} as a name", f"run: {{name: {name!r}}}", "a.yml:2: run.name", "must be the name of a folder")
        for name in ("", "..", "a/../../b", "/tmp/x")
    ],
    case("name too long", f"run: {{name: {'a' * 300}}}", "run.dir = ", "a name in it has 300 bytes"),
    case(
        "half of a pair",
        'run: {name: x, notes: "\\ud800"}',
        "a.yml:2: run.notes",
        "text must be Unicode, and a half of a surrogate pair is none",
    ),
    case("line break in a name", 'run: {name: "a\\nb", dir: runs/x}', "run.name", "without line breaks", "remove them"),
    case(
        "no image",
        "launch: {container: apptainer, python: python3}",
        "launch.container = 'apptainer'",
        "must be TOOL:IMAGE",
    ),
    case(
        "uploads to nowhere",
        "checkpoint: {upload_every: 10}",
        "a.yml:2: checkpoint.upload_every = 10",
        "must go with checkpoint.upload",
    ),
    *[
        case(
            f"uploads to a URL in which the name {name} stands",
            f"run: {{name: '{name}', dir: runs/x}}\ncheckpoint: {{upload: 'memory://a/{{run.name}}'}}",
            f"a.yml:2: run.name = '{name}'",
            "must be letters, digits and . _ ~ - after a letter or digit, without ..",
            "write the URL without {run.name}",
        )
        for name in ("a{b}", "a/b", "..", "a..b", "a b", "a%2Fb", "a?b", "a#b", "ä")
    ],
    case(
        "uploads to a place of an unknown name",
        "checkpoint: {upload: 'memory://a/{name}'}",
        "a.yml:2: checkpoint.upload = 'memory://a/{name}'",
        "in which only {run.name} may stand in braces",
    ),
    case(
        "uploads of what is not saved",
        "checkpoint: {every: 10, upload_every: 15, upload: 'memory://a'}",
        "a.yml:2: checkpoint.upload_every = 15",
        "must be a multiple of checkpoint.every",
        "use 20",
    ),
    case(
        "spares of one host, which nobody would ask for",
        "launch: {spares: 1}",
        "a.yml:2: launch.spares = 1",
        "must go with launch.restarts",
        "must be fewer than the hosts",
        problems=2,
    ),
    case(
        "one host to compare",
        "launch: {compare: true}",
        "a.yml:2: launch.compare = true",
        "must have hosts to compare, and this run has one",
        "launch.hostfile",
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
        "levels without a place, too often, and twice",
        "checkpoint:\n  optimizer_state: false\n  levels:\n    - {place: disk, every: 0}\n"
        "    - {place: memory, every: 1, path: tmp}\n    - {place: memory, every: auto, path: tmp}",
        "a disk must have a path",
        "a.yml:5: checkpoint.levels.0.every = 0",
        "must be at least 1, or auto",
        "a.yml:6: checkpoint.levels.1.path = 'tmp'",
        "must be an absolute path",
        "must not be the folder of another level, 1",
        "a.yml:3: checkpoint.optimizer_state = false",
        "must be true with checkpoint.levels",
        problems=6,
    ),
    case(
        "neighbours of the only host",
        "checkpoint: {levels: [{place: memory, every: 5, neighbours: 1}]}",
        "a.yml:2: checkpoint.levels.0.neighbours = 1",
        "must be fewer than the hosts, and this run has one",
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
        "statistics between logged lines",
        "logging: {every: 10, statistics: 25}",
        "a.yml:2: logging.statistics = 25",
        "must be a multiple of logging.every",
        "use 30",
    ),
    case(
        "noise scale between logged lines",
        "logging: {every: 10, noise_scale: 25}",
        "a.yml:2: logging.noise_scale = 25",
        "must be a multiple of logging.every",
        "use 30",
    ),
    case(
        "noise scale of one sample",
        "training: {global_batch_size: 1, micro_batch_size: 1}\nparallel: {tensor: 2}\nlogging: {noise_scale: 10}",
        "logging.noise_scale = 10",
        "at least two samples in a batch",
    ),
    case(
        "rollback without checkpoints",
        "spikes: {action: rollback}",
        "a.yml:2: spikes.action = 'rollback'",
        "must have checkpoints to go back to",
        "give checkpoint.every",
    ),
    case(
        "AdaGC of two copies, and of norms that nobody knows",
        "spikes: {action: adagc}\nmodel: {embedding: {tied: true}}\nparallel: {pipeline: 2}\nlogging: {statistics: 5}",
        "a.yml:2: spikes.action = 'adagc'",
        "must not go with a tied embedding in a pipeline",
        "a.yml:5: logging.statistics = 5",
        "must be off with adagc",
        problems=2,
    ),
    case(
        "another place without a restart",
        "spikes: {attribute: true}",
        "a.yml:2: spikes.attribute = true",
        "must go with launch.restarts",
        "must have checkpoints that a restart begins from",
        problems=2,
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
