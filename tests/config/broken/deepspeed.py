"""ZeRO stages, messages and DeepSpeed options that cannot be."""

from tests.config.broken.case import case

ZERO = [
    case(
        "ZeRO 2 with a pipeline and sums in bf16",
        "parallel: {pipeline: 2}\nzero: {stage: 2}\nprecision: {compute: bf16, accumulate: bf16}",
        "a.yml:3: zero.stage = 2",
        "parallel.pipeline = 2 (a.yml:2)",
        "zero.stage must be 0 or 1 with a pipeline and precision.accumulate=bf16",
        "use zero.stage=1",
    ),
    case(
        "ZeRO 3 with a pipeline and compressed gradients",
        "parallel: {pipeline: 2, communication: {compress: {data: bf16}}}\nzero: {stage: 2}",
        "zero.stage must be 0 or 1 with a pipeline and compressed gradients",
    ),
    case(
        "ZeRO 0 in bf16",
        "precision: bf16\nzero: {stage: 0}",
        "a.yml:3: zero.stage = 0",
        "precision.compute = 'bf16' (a.yml:2)",
        "use zero.stage=1",
    ),
    case(
        "parameters offloaded at stage 1",
        "zero: {offload_parameters: {device: cpu}}",
        "a.yml:2: zero.offload_parameters.device = 'cpu'",
        "use zero.stage=3",
    ),
    case(
        "optimizer offloaded at stage 0",
        "zero: {stage: 0, offload_optimizer: {device: cpu}}",
        "must go with ZeRO 1, 2 or 3",
    ),
    case(
        "NVMe without a folder",
        "zero: {stage: 3, offload_optimizer: {device: nvme}}",
        "must have a folder",
        "give zero.offload_optimizer.path",
    ),
    case("NVMe at stage 1", "zero: {offload_optimizer: {device: nvme, path: /x}}", "NVMe must go with ZeRO 3"),
    case(
        "offloading with a pipeline",
        "parallel: {pipeline: 2}\nzero: {offload_optimizer: {device: cpu}}",
        "a.yml:3",
        "must go without a pipeline",
    ),
    case(
        "SGD offloaded",
        "zero: {offload_optimizer: {device: cpu}}\noptimizer: {type: sgd}",
        "must be adamw for offloaded state",
        "(a.yml:3)",
    ),
    case(
        "gradients reduced once per step that are summed in another type",
        "precision: bf16\nzero: {stage: 2, reduce: step}",
        "a.yml:3: zero.reduce = 'step'",
        "in which DeepSpeed keeps whole gradients",
        "use zero.stage=1, or precision.accumulate=bf16",
    ),
    case(
        "gradients of a pipeline in bf16 that are reduced once per step",
        "precision: bf16\nparallel: {pipeline: 2}\nzero: {stage: 2, reduce: step}",
        "a.yml:4: zero.reduce = 'step'",
        "use zero.reduce=micro_batch",
    ),
    case(
        "gradients reduced once per step for an offloaded optimizer",
        "zero: {stage: 2, reduce: step, offload_optimizer: {device: cpu}}",
        "a.yml:2: zero.reduce = 'step'",
        "must not go with an offloaded optimizer",
    ),
]

COMMUNICATION = [
    case(
        "islands that do not fill the job",
        "parallel: {communication: {island: 3}}",
        "a.yml:2: parallel.communication.island = 3",
        "must divide the run's 4 ranks",
        ranks=4,
    ),
    case(
        "pairs that do not fill the islands",
        "parallel: {communication: {island: 4, pair: 3}}",
        "a.yml:2: parallel.communication.pair = 3",
        "must divide the island's 4 ranks",
        ranks=8,
    ),
    case(
        "compressed gradients at ZeRO 3",
        "parallel: {communication: {compress: {data: int8_block}}}\nzero: {stage: 3}",
        "a.yml:2: parallel.communication.compress.data = 'int8_block'",
        "must be none at ZeRO 3",
        "use zero.stage=1",
    ),
    case(
        "feedback of compressed gradients across a restart that is compared",
        "parallel: {communication: {compress: {data: top_k}}}\nspikes: {action: skip, attribute: true}\n"
        "checkpoint: {every: 2}\nlaunch: {restarts: 3}",
        "a.yml:2: parallel.communication.compress.data = 'top_k'",
        "must not be int8_block or top_k where losses before and after a restart are compared",
        "spikes.attribute=false",
    ),
    case(
        "activations that have 16 bits already",
        "parallel: {tensor: 2, communication: {compress: {tensor: fp16}}}\nprecision: bf16",
        "a.yml:2: parallel.communication.compress.tensor = 'fp16'",
        "must be none or int8_block where activations have 16 bits already (bf16)",
    ),
    case(
        "blocks that would not be whole",
        "parallel: {pipeline: 2, communication: {compress: {pipeline: int8_block}}}\n"
        "model: {hidden_size: 24, attention: {heads: 2}}",
        "a.yml:2: parallel.communication.compress.pipeline = 'int8_block'",
        "int8_block must go with a hidden size that 16 divides",
    ),
    case(
        "blocks of a column's channels that would not be whole",
        "parallel: {pipeline: 2, columns: 2, communication: {compress: {pipeline: int8_block}}}\n"
        "model: {hidden_size: 48, attention: {heads: 2}}",
        "a.yml:2: parallel.communication.compress.pipeline = 'int8_block'",
        "channels of a column that 16 divides, so that blocks are whole, and here are 24",
        "use compress.pipeline=bf16, or fewer columns",
        ranks=4,
    ),
    case(
        "blocks of router states that would not be whole",
        "parallel: {pipeline: 2, communication: {compress: {pipeline: int8_block}}}\n"
        "model: {layers: attention/moe@first attention/moe x3, variants: {first: {router: {average: false}}},\n"
        "  moe: {experts: 4, losses: {balance: 0}, router: {network: mlp, width: 15}}}",
        "a.yml:4: model.moe.router.width = 15",
        "must have a multiple of 16 channels to travel as int8_block",
        "compress.pipeline=bf16",
    ),
    case(
        "blocks of a rank's first values that would not be whole",
        "parallel: {pipeline: 2, tensor: 8, communication: {compress: {pipeline: int8_block}}}\n"
        "model: {layers: (rwkv7/mlp) x4, rwkv7: {head_dim: 8}}",
        "a.yml:2: parallel.communication.compress.pipeline = 'int8_block'",
        "the 8 values that a rank has of the first rwkv7 layer must be a multiple of 16",
        ranks=16,
    ),
    case(
        "a table that is not there",
        "parallel: {communication: {table: none.yml}}",
        "a.yml:2: parallel.communication.table = 'none.yml'",
        "there is no such file",
        "--tune",
    ),
    case(
        "a table of no algorithms",
        "parallel: {communication: {table: base.yml}}",
        "must be a machine.yml with algorithms",
        "--tune",
    ),
    case(
        "a table of another job",
        "parallel: {communication: {table: machine.yml, island: 1}}\nlaunch: {device: cpu}",
        "ranks: 4 in the table, 2 in this job",
        "the backend: nccl in the table, gloo in this job",
    ),
    case(
        "a table in three levels without pairs",
        "parallel: {communication: {table: three.yml, island: 2}}",
        "must go with pair where it has algorithms in three levels",
        "set parallel.communication.pair",
        ranks=4,
    ),
]

DEEPSPEED = [
    case(
        "removed block",
        "deepspeed: {elasticity: {enabled: true}}",
        "a.yml:2: deepspeed.elasticity",
        "DeepSpeed 0.19.8 no longer has this",
    ),
    case(
        "partitioned pipeline messages",
        "deepspeed: {pipeline: {pipe_partitioned: true}}",
        "a.yml:2: deepspeed.pipeline.pipe_partitioned = true",
        "stages exchange",
    ),
    case(
        "quantised weights on CPUs",
        "deepspeed: {zero_optimization: {zero_quantized_weights: true}}\nlaunch: {device: cpu}\nzero: {stage: 3}",
        "a.yml:2: deepspeed.zero_optimization.zero_quantized_weights = true",
        "quantises with CUDA operations",
        "use parallel.communication.compress.data",
    ),
    case(
        "removed ZeRO option",
        "deepspeed:\n  zero_optimization:\n    mics_shard_size: 4",
        "a.yml:4: deepspeed.zero_optimization.mics_shard_size = 4",
        "use zero_hpz_partition_size",
    ),
    case(
        "contradicts the batch size",
        "deepspeed: {train_batch_size: 32}",
        "a.yml:2: deepspeed.train_batch_size = 32",
        "training.global_batch_size = 16 (base.yml:10)",
        "must agree with training.global_batch_size",
    ),
    case(
        "contradicts the stage",
        "deepspeed: {zero_optimization: {stage: 2}}",
        "deepspeed.zero_optimization.stage = 2",
        "zero.stage = 1 (default)",
    ),
    case(
        "optimizer of its own",
        "deepspeed: {optimizer: {type: Adam}}",
        "a.yml:2: deepspeed.optimizer",
        "use optimizer.type and its keys",
    ),
    case("sequence parallel by the raw route", "deepspeed: {sequence_parallel_size: 2}", "does not reduce gradients"),
    case(
        "the type of what DeepSpeed's own sequence parallel ranks send",
        "deepspeed: {seq_parallel_communication_data_type: bf16}",
        "a.yml:2: deepspeed.seq_parallel_communication_data_type",
        "ranks that share sequences are set by parallel.context",
        "remove it",
    ),
]
