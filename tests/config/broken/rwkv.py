"""RWKV models that cannot be."""

from tests.config.broken.case import case

RWKV = [
    case(
        "rwkv7 heads are not whole",
        "model: {layers: (rwkv7/rwkv7_ffn) x4, rwkv7: {head_dim: 24}}",
        "a.yml:2: model.rwkv7.head_dim = 24",
        "the 64 channels of rwkv7, must be a multiple of head_dim",
        "use head_dim = 16 or 32",
    ),
    case(
        "rwkv7 heads do not divide over ranks",
        "model: {layers: rwkv7@wide/mlp x4, rwkv7: {head_dim: 16}, variants: {wide: {head_dim: 32}}}\n"
        "parallel: {tensor: 4}",
        "a.yml:2: model.variants.wide.head_dim = 32",
        "the same number of the 2 heads of rwkv7",
        "use parallel.tensor = 2",
        ranks=4,
    ),
    case(
        "rwkv4 channels do not divide over ranks",
        "model: {layers: rwkv4 x4, hidden_size: 66}\nparallel: {tensor: 4}",
        "a.yml:2: model.hidden_size = 66",
        "the same number of the 66 channels of rwkv4",
        "use parallel.tensor = 3 or 6",
        ranks=4,
    ),
    case(
        "width of a channel mix does not divide over ranks",
        "model: {layers: rwkv7_ffn x4, rwkv7_ffn: {hidden_size: 90}}\nparallel: {tensor: 4}",
        "a.yml:2: model.rwkv7_ffn.hidden_size = 90",
        "the same number of the 90 channels of rwkv7_ffn",
        ranks=4,
    ),
    case(
        "chunk of rwkv7 too long", "model: {layers: rwkv7 x4, rwkv7: {chunk: 256}}", "a.yml:2: model.rwkv7.chunk = 256"
    ),
    case(
        "offloaded parameters beside rwkv7",
        "model: {layers: rwkv7 x4, rwkv7: {head_dim: 16}}\nprecision: bf16\n"
        "zero: {stage: 3, offload_parameters: {device: cpu}}",
        "zero.offload_parameters.device = 'cpu'",
        "rwkv7 has some that stay in fp32",
    ),
]
