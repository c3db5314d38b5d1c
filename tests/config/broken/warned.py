"""Settings that are allowed, but probably not meant."""

from tests.config.broken.case import case

LLAMA_70B = (
    "model:\n  hidden_size: 8192\n  vocab_size: 128256\n  layers: (attention/mlp) x80\n"
    "  attention: {heads: 64, kv_heads: 8}\n  mlp: {hidden_size: 28672, gated: true}\n"
)

WARNED = [
    case(
        "70 billion parameters on each rank",
        LLAMA_70B + "checkpoint: {at_end: false}",
        "a.yml:5: model.layers",
        "of 70,552,387,584 parameters take at least 788.5 GiB on each rank",
        "this machine has 64.0 GiB for 2 of them",
    ),
    case(
        "checkpoints larger than the disk",
        "model: {vocab_size: 200000, hidden_size: 1024}\ncheckpoint: {every: 1}",
        "checkpoint.every = 1 (a.yml:3)",
        "100 more checkpoints of at least 5.1 GiB will be kept, 514.0 GiB in all, and 100.0 GiB are free there",
        "give checkpoint.keep_last",
    ),
    case(
        "recurrence without a recurrent group",
        "model: {recurrence: {mean: 4}}",
        "a.yml:2: model.recurrence.mean = 4",
        "must go with a recurrent group in model.layers, and has no effect here",
    ),
    case(
        "rounds of balancing for one row",
        "model: {residual: {sinkhorn_iterations: 5}}",
        "a.yml:2: model.residual.sinkhorn_iterations = 5",
        "must go with several streams, and has no effect here",
    ),
    case(
        "base of a standard parametrization",
        "model: {parametrization: {base_width: 32}}",
        "a.yml:2: model.parametrization.base_width = 32",
        "base_width must go with type: mup or completep, and has no effect here",
    ),
    case(
        "gradients that are reduced once per step anyway",
        "zero: {stage: 1, reduce: step}",
        "a.yml:2: zero.reduce = 'step'",
        "must go with zero.stage 2 or 3",
    ),
    case(
        "compressed gradients of one rank",
        "parallel: {communication: {compress: {data: bf16}}}",
        "a.yml:2: parallel.communication.compress.data = 'bf16'",
        "must go with several data parallel ranks",
        ranks=1,
    ),
    case(
        "the noise scale of what is sent",
        "parallel: {communication: {compress: {data: top_k}}}\nlogging: {noise_scale: 1}",
        "a.yml:3: logging.noise_scale = 1",
        "must go with gradients that travel whole",
        "compress.data=none",
    ),
    case(
        "compressed activations of one rank",
        "parallel: {communication: {compress: {tensor: bf16}}}",
        "a.yml:2: parallel.communication.compress.tensor = 'bf16'",
        "must go with parallel.tensor above 1",
    ),
    case(
        "sequence parallel alone",
        "parallel: {sequence: true}",
        "a.yml:2: parallel.sequence = true",
        "must go with tensor parallelism",
    ),
    case(
        "mistyped name of DeepSpeed",
        "deepspeed: {coms_logger: {enabled: true}}",
        "a.yml:2: deepspeed.coms_logger",
        "which would ignore this one",
        "did you mean comms_logger?",
    ),
    case("name that DeepSpeed does not have", "deepspeed: {foo: 1}", "deepspeed.foo = 1", "remove it"),
    case("traffic of ZeRO 2", "zero: {stage: 2}", "a.yml:2: zero.stage = 2", "4 times the traffic"),
    case(
        "pipeline not filled",
        "parallel: {pipeline: 2}\ntraining: {micro_batch_size: 16}",
        "training.accumulation = 1",
        "idle 50 % of the time",
        "at least 8 micro-batches",
    ),
    case(
        "overlap in a pipeline",
        "parallel: {pipeline: 2}\nzero: {overlap: true}",
        "a.yml:3: zero.overlap = true",
        "overlap must be false with a pipeline",
    ),
    case(
        "overlap of a sum after the last backward pass",
        "precision: bf16\nzero: {stage: 1, overlap: true}",
        "a.yml:3: zero.overlap = true",
        "and has no effect",
    ),
    case(
        "offload options of nothing",
        "zero: {offload_optimizer: {pin_memory: true}}",
        "must go with device: cpu or nvme, since nothing is offloaded",
    ),
    case(
        "loss scale without fp16",
        "precision: {loss_scale: {window: 500}}",
        "precision.loss_scale.window = 500",
        "must go with fp16",
    ),
    case("momentum of AdamW", "optimizer: {momentum: 0.8}", "optimizer.momentum = 0.8", "must go with sgd"),
    case("every n-th block of none", "training: {activation_checkpointing: {every: 2}}", "must go with mode: full"),
    case(
        "stop after the end",
        "training: {stop_at_step: 101}",
        "must be at most training.steps: the run ends before this step",
    ),
    case("decay of a cosine", "schedule: {decay_steps: 5}", "must go with wsd or infinite"),
    case(
        "warmup of more than half in compat",
        "schedule: {warmup_steps: 60, compat: neox-v1}",
        "a.yml:2: schedule.warmup_steps = 60",
        "above the peak learning rate",
    ),
    case(
        "warmup of less than a step in compat",
        "schedule: {warmup_fraction: 0.002, compat: neox}",
        "a.yml:2: schedule.warmup_fraction = 0.002",
        "5 times the peak",
    ),
    case("schedule shorter than the run", "schedule: {steps: 50}", "the last 50 steps keep"),
    case("exponent of given weights", "data: {alpha: 0.5}", "data.alpha = 0.5", "weighting: documents, tokens"),
    case(
        "variant never used",
        "model: {variants: {local: {window: 8}}}",
        "a.yml:2: model.variants.local",
        "must be used in the pattern",
    ),
    case(
        "kept but not saved",
        "checkpoint: {keep_last: 2}",
        "must go with checkpoint.every: nothing is saved before the end",
    ),
    case("steps after the end", "checkpoint: {steps: [101]}", "the run ends before step 101"),
    case(
        "resume without optimizer state",
        "checkpoint: {optimizer_state: false, resume: auto}",
        "must be true for checkpoints to resume from",
    ),
    case("profile after the end", "logging: {profile: {start: 101}}", "ends before the profile starts"),
    case(
        "a window that is never half full",
        "spikes: {action: skip, window: 500}",
        "a.yml:2: spikes.window = 500",
        "half a window, 250 steps, must have passed",
    ),
    case(
        "a vocabulary that ranks do not divide",
        "model: {vocab_size: 99}\nparallel: {folded: 2}",
        "a.yml:2: model.vocab_size = 99",
        "should be a multiple of parallel.folded = 2",
        ranks=2,
    ),
    case(
        "more passes over the data than anything is learned from",
        "data: {synthetic: none, train: few}",
        "200 passes: data.train has 256 tokens",
        "at most 2 steps for 4 passes",
    ),
]
