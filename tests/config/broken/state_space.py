"""Models of Mamba, Mamba-2 and gated delta layers that cannot be."""

from tests.config.broken.case import case

STATE_SPACE = [
    case(
        "mamba heads are not equal",
        "model: {layers: mamba x4, mamba: {heads: 3}}",
        "a.yml:2: model.mamba.heads = 3",
        "the heads must share the 128 inner channels",
        "use 2 or 4 heads",
    ),
    case(
        "mamba heads over ranks",
        "model: {layers: mamba x4, hidden_size: 96, mamba: {heads: 3}}\nparallel: {tensor: 2}",
        "a.yml:2: model.mamba.heads = 3",
        "whole heads of mamba (3 in all), or an equal part of one",
        "use parallel.tensor = 1 or 3 or a multiple of 3",
    ),
    case(
        "mamba2 heads are not whole",
        "model: {layers: mamba2 x4, mamba2: {head_dim: 48}}",
        "a.yml:2: model.mamba2.head_dim = 48",
        "expand * hidden_size (128 inner channels) must be a multiple of head_dim",
        "use head_dim = 32 or 64",
    ),
    case(
        "mamba2 step limits from above to below",
        "model: {layers: mamba2 x4, mamba2: {head_dim: 32, least_step: 0.1, most_step: 0.05}}",
        "a.yml:2: model.mamba2.most_step = 0.05",
        "with: model.mamba2.least_step = 0.1",
        "most_step must be above least_step",
    ),
    case(
        "mamba2 groups do not divide the heads",
        "model: {layers: mamba2@wide x4, mamba2: {head_dim: 16}, variants: {wide: {groups: 3}}}",
        "a.yml:2: model.variants.wide.groups = 3",
        "each group must have the same number of the 8 heads",
        "use groups = 2 or 4",
    ),
    case(
        "mamba channels do not divide over ranks",
        "model: {layers: mamba x4, hidden_size: 63, mamba: {expand: 1}}\nparallel: {tensor: 2}",
        "a.yml:2: model.mamba.expand = 1",
        "the same number of the 63 inner channels",
        "use parallel.tensor = 1 or 3, or 62 or 64 inner channels",
    ),
    case(
        "mamba2 heads do not divide over ranks",
        "model: {layers: mamba2 x4}\nparallel: {tensor: 4}",
        "parallel.tensor = 4",
        "each tensor parallel rank must have the same number of the 2 inner heads",
        ranks=4,
    ),
    case(
        "gated_delta without heads",
        "model: {layers: (gated_delta/mlp) x4}",
        "model.gated_delta.heads",
        "the number of heads must be given for a pattern with gated_delta layers",
    ),
    case(
        "heads of keys do not divide heads of values",
        "model: {layers: gated_delta@few x4, gated_delta: {heads: 8}, variants: {few: {key_heads: 3}}}",
        "a.yml:2: model.variants.few.key_heads = 3",
        "model.gated_delta.heads = 8",
        "use 2 or 4 key_heads",
    ),
    case(
        "time steps from above to below",
        "model: {layers: mamba2 x4, mamba2: {head_dim: 16, time_step_low: 0.2}}",
        "a.yml:2: model.mamba2.time_step_low = 0.2",
        "model.mamba2.time_step_high = 0.1",
        "time_step_low must not exceed time_step_high",
    ),
    case(
        "decay rates from nowhere",
        "model: {layers: gated_delta x4, gated_delta: {heads: 4, decay_low: 16.0}}",
        "model.gated_delta.decay_high = 16.0",
        "decay_high must be above decay_low",
    ),
    case(
        "gated_delta heads do not divide over ranks",
        "model: {layers: gated_delta x4, gated_delta: {heads: 6}}\nparallel: {tensor: 4}",
        "a.yml:2: model.gated_delta.heads = 6",
        "each tensor parallel rank must have the same number of the 6 heads of gated_delta",
        "use parallel.tensor = 3 or 6",
        ranks=4,
    ),
    case(
        "more heads of keys than channels for them",
        "model: {layers: gated_delta x4, gated_delta: {heads: 64}}",
        "default: model.gated_delta.key_dim = null",
        "model.gated_delta.heads = 64 (a.yml:2)",
        "each of 64 heads of keys must have a channel",
        "give key_dim",
    ),
]
