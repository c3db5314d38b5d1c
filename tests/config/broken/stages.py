"""Stages of sequence length that cannot be."""

from tests.config.broken.case import case


def stages(text: str) -> str:
    return "training: {sequence_schedule: [" + text + "]}"


STAGES = [
    case(
        "a stage's length that cuts samples unevenly",
        stages("{until: 50, sequence_length: 12}"),
        "a.yml:2: training.sequence_schedule.0.sequence_length = 12",
        "must divide training.sequence_length = 32",
        "fix:  use 8 or 16 tokens",
    ),
    case(
        "a stage longer than the last",
        stages("{until: 50, sequence_length: 64}"),
        "training.sequence_schedule.0.sequence_length = 64",
        "must divide training.sequence_length = 32",
        "fix:  use 32 tokens",
    ),
    case(
        "a stage too short for ranks that share a sequence",
        stages("{until: 50, sequence_length: 2}") + "\nparallel: {context: 2, context_method: ring}",
        "training.sequence_schedule.0.sequence_length = 2",
        "parallel.context = 2",
        "be a multiple of 4: ranks have equal parts of it",
        "fix:  use 4 tokens",
    ),
    case(
        "a stage too short for sequence parallel ranks",
        stages("{until: 50, sequence_length: 1}") + "\nparallel: {tensor: 2, sequence: true}",
        "training.sequence_schedule.0.sequence_length = 1",
        "a multiple of 2",
        "fix:  use 2 tokens",
    ),
    case(
        "a stage too short for a convolution of ranks that share a sequence",
        stages("{until: 50, sequence_length: 4}")
        + "\nparallel: {context: 2}\nmodel: {layers: mamba2/mlp, mamba2: {head_dim: 8}}",
        "training.sequence_schedule.0.sequence_length = 4",
        "tokens that convolutions of the next one look back to",
    ),
    case(
        "stages out of order",
        stages("{until: 50, sequence_length: 8}, {until: 50, sequence_length: 16}"),
        "training.sequence_schedule.1.until = 50",
        "must be above the end of the stage before, 50",
        "fix:  use more than 50",
    ),
    case(
        "a stage that turns a kind that has no positions",
        stages("{until: 50, sequence_length: 8, rotary: {atention: {base: 100}}}"),
        "training.sequence_schedule.0.rotary.atention",
        "must be a kind with rotary positions, and this model has attention",
        "attention",
    ),
    case(
        "a stage's scaling without the original length",
        stages("{until: 50, sequence_length: 8, rotary: {attention: {base: 100, scaling: {type: yarn, factor: 2}}}}"),
        "training.sequence_schedule.0.rotary.attention.scaling.original_length",
        "the original context length must be given for yarn scaling",
    ),
    case(
        "a stage's scaling that the scale of attention would follow",
        stages("{until: 50, sequence_length: 8, rotary: {mla: {base: 100}}}")
        + "\nmodel: {layers: mla/mlp, mla: {heads: 4, kv_rank: 16, nope_dim: 8, rope_dim: 8, value_dim: 8, "
        "mscale_all_dim: 1.0, rotary: {scaling: {type: yarn, factor: 4, original_length: 8}}}}",
        "training.sequence_schedule.0.rotary.mla.scaling",
        "must be the model's, since its scale of attention follows from it",
    ),
    case("a stage without end", stages("{sequence_length: 8}"), "training.sequence_schedule.0.until is required"),
]
WARNED_STAGES = [
    case(
        "a stage beyond the last step",
        stages("{until: 100, sequence_length: 8}"),
        "training.sequence_schedule.0.until = 100",
        "must be below training.steps",
    ),
    case(
        "packed documents that stages cut",
        stages("{until: 50, sequence_length: 8}") + "\ndata: {packing: best_fit, order: stream}",
        "data.packing = 'best_fit'",
        "shorter stages cut some of these",
    ),
]
