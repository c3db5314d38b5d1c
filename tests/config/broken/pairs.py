"""Keys that do not fit another key."""

from tests.config.broken.case import case

PAIRS = [
    case(
        "spare hosts of torchrun",
        "launch: {spares: 1, restarts: 2, runner: torchrun}",
        "a.yml:2: launch.spares = 1",
        "must be 0 with torchrun",
    ),
    case(
        "packing of GPT-NeoX in another order",
        "data: {synthetic: none, train: few, packing: until_overflow, order: stream}",
        "a.yml:2: data.packing = 'until_overflow'",
        "until_overflow must go with the pythia order",
    ),
    case(
        "a constant rate below the lowest one",
        "schedule: {type: infinite, cooldown_steps: 10, min_lr_ratio: 0.5, constant_lr_ratio: 0.1}",
        "a.yml:2: schedule.constant_lr_ratio = 0.1",
        "the constant rate must not be below the lowest one",
        "use at least 0.5",
    ),
    case(
        "one norm of two branches with norms of outputs",
        "model: {residual: {form: parallel, shared_norm: true, norm: both}}",
        "a.yml:2: model.residual.shared_norm = true",
        "shared_norm must go with norm: pre",
    ),
    case(
        "shares of a file beside phases",
        "data: {synthetic: none, split: [1], phases: [{start: 0, sources: [few]}]}",
        "a.yml:2: data.split",
        "split must not go with phases",
    ),
    case(
        "long documents of a packing that cuts them",
        "data: {drop_long: true}",
        "a.yml:2: data.drop_long = true",
        "must go with data.packing: until_overflow",
    ),
    case(
        "mounts without a container",
        "launch: {container_mounts: [/data]}",
        "a.yml:2: launch.container_mounts",
        "must go with launch.container",
    ),
    case(
        "a container without its interpreter",
        "launch: {container: 'apptainer:/x.sif'}",
        "launch.python = null",
        "must be given with a container",
    ),
    case(
        "blocks of activations with losses of experts",
        "model: {layers: (attention/moe) x4, moe: {experts: 4, top_k: 2, losses: {balance: 0.01}}}\n"
        "parallel: {pipeline: 2, communication: {compress: {pipeline: int8_block}}}",
        "a.yml:3: parallel.communication.compress.pipeline = 'int8_block'",
        "must not be int8_block with auxiliary losses of experts",
    ),
    case(
        "steps before the first phase",
        "data: {synthetic: none, phases: [{start: 5, sources: [few]}]}",
        "data.phases.0.start = 5",
        "the first phase must start at step 0",
    ),
    case(
        "rows of new tokens without weights",
        "checkpoint: {initialize_vocabulary: mean}",
        "a.yml:2: checkpoint.initialize_vocabulary = 'mean'",
        "must go with checkpoint.initialize_from",
    ),
    case(
        "a later start of GPT-NeoX's schedule",
        "schedule: {compat: neox, start: 3}",
        "a.yml:2: schedule.start = 3",
        "GPT-NeoX's schedule starts at step 0",
    ),
]
WARNED_PAIRS = [
    case(
        "a way to share sequences that no ranks share",
        "parallel: {context_method: ring}",
        "a.yml:2: parallel.context_method = 'ring'",
        "must go with ranks that share sequences",
    )
]
