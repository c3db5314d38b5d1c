"""Mixtures of experts that cannot be."""

from tests.config.broken.case import case

_MOE = "model: {layers: (attention/moe) x4, moe: {"

MOE = [
    case("more experts per token than experts", _MOE + "experts: 4, top_k: 5}}", "a.yml:2: model.moe.top_k = 5",
         "model.moe.experts = 4", "cannot use more experts than there are", "use at most 4"),
    case("groups do not divide the experts", _MOE + "experts: 8, router: {groups: 3}}}",
         "a.yml:2: model.moe.router.groups = 3", "equal numbers of experts", "use 2 or 4 groups"),
    case("more groups to choose from than groups", _MOE + "router: {groups: 2, top_groups: 4}}}",
         "model.moe.router.top_groups = 4", "more groups than there are"),
    case("groups too small", _MOE + "top_k: 3, router: {groups: 4, top_groups: 1}}}", "a.yml:2: model.moe.top_k = 3",
         "a token may choose from have 2 experts"),
    case("experts of odd width", _MOE + "hidden_size: 46}}", "a.yml:2: model.moe.hidden_size = 46",
         "a multiple of 16 bytes (4 channels in fp32)", "use 44 or 48 channels"),
    case("experts too narrow for the ranks", _MOE + "hidden_size: 24}}\nparallel: {tensor: 2}\nprecision: bf16",
         "model.moe.hidden_size = 24", "parallel.tensor = 2", "8 channels in bf16", "use 16 or 32 channels"),
    case("a variant's shared expert does not divide", "model: {layers: (attention/moe@wide) x4, moe: {hidden_size: 64}, "
         "variants: {wide: {shared_size: 33}}}\nparallel: {tensor: 2}", "a.yml:2: model.variants.wide.shared_size = 33",
         "share of the shared expert's channels", "use 32 or 34"),
    case("hidden size of odd width", "model: {layers: moe x4, hidden_size: 66, moe: {hidden_size: 64}}", "model.hidden_size = 66",
         "use 64 or 68 channels"),
    case("correction beside Sinkhorn", _MOE + "router: {select: sinkhorn, correction: sign}}}",
         "model.moe.router.correction = 'sign'", "sinkhorn evens the load by itself"),
    case("groups beside Sinkhorn", _MOE + "router: {select: sinkhorn, groups: 4, top_groups: 2}}}", "sinkhorn knows no groups"),
    case("expert choice cannot be normalised", _MOE + "router: {select: expert_choice, normalize: true}}}",
         "a.yml:2: model.moe.router.normalize = true", "nothing can be normalised"),
    case("offloaded parameters beside a router",
         "model: {layers: (attention/moe) x4}\nprecision: bf16\nzero: {stage: 3, offload_parameters: {device: cpu}}",
         "zero.offload_parameters.device = 'cpu'", "moe has parameters that stay in fp32"),
    case("no router state to average with", _MOE + "router: {network: mlp}}}", "model.layers = '(attention/moe) x4' (a.yml:2)",
         "model.moe.router.average = true", "no router state before it", "attention/moe@first"),
    case("one expert or none, and another", _MOE + "router: {skip: true}}}", "a.yml:2: model.moe.router.skip = true",
         "model.moe.top_k = 2", "chooses none beside it"),
    case("experts do not divide over ranks", _MOE + "experts: 6}}\nparallel: {expert: 4}", "a.yml:2: model.moe.experts = 6",
         "parallel.expert = 4", "the same number of experts", "use 4 or 8 experts, or parallel.expert = 3 or 6", ranks=4),
    case("expert ranks do not divide the data axis", _MOE + "experts: 8}}\nparallel: {expert: 4, tensor: 2}",
         "a.yml:3: parallel.expert = 4", "parallel.tensor = 2", "data parallel ranks, of which there are 2",
         "tensor parallel ranks have slices of every expert", "use parallel.expert = 2", ranks=4),
    case("folded expert ranks do not divide their line", _MOE + "experts: 12}}\nparallel: {expert: 3, tensor: 2, expert_tensor: 1}",
         "a.yml:3: parallel.expert = 3", "data and tensor parallel ranks of a stage, of which there are 4",
         "use parallel.expert = 2 or 4", ranks=4),
    case("as many expert ranks as folding would allow", _MOE + "experts: 8}}\nparallel: {expert: 4, tensor: 2}",
         "a.yml:3: parallel.expert = 4", "use parallel.expert = 2, parallel.expert_tensor=1, or another number of ranks", ranks=4),
    case("experts cut into other parts than the rest", _MOE + "experts: 8}}\nparallel: {tensor: 4, expert_tensor: 2}",
         "a.yml:3: parallel.expert_tensor = 2", "parallel.tensor = 4", "is whole on each of them", "= 1 or 4", ranks=4),
    case("folded over one rank", _MOE + "experts: 8}}\nparallel: {expert_tensor: 2}", "a.yml:3: parallel.expert_tensor = 2",
         "parallel.tensor = 1", "use parallel.expert_tensor = 1"),
    case("folded experts under ZeRO 3", _MOE + "experts: 8}}\nparallel: {tensor: 2, expert_tensor: 1}\nzero: {stage: 3}",
         "a.yml:4: zero.stage = 3", "parallel.expert_tensor = 1", "leave parallel.expert_tensor out", ranks=2),
    case("folded experts beside unequal shards", "model: {layers: (attention/moe) x4, vocab_size: 99}\n"
         "parallel: {tensor: 2, expert_tensor: 1}", "a.yml:2: model.vocab_size = 99", "parallel.expert_tensor = 1",
         "equal numbers of parameters", "use model.vocab_size=100, model.vocab_multiple=2, or zero.stage=0", ranks=2),
    case("nothing to fold", "parallel: {tensor: 2, expert_tensor: 1}", "a.yml:2: parallel.expert_tensor = 1",
         "there are no experts to spread", "leave parallel.expert_tensor out", ranks=2),
    case("experts spread under ZeRO 3", _MOE + "experts: 8}}\nparallel: {expert: 2}\nzero: {stage: 3}", "a.yml:4: zero.stage = 3",
         "parallel.expert = 2", "ZeRO 3 cuts every parameter over all data parallel ranks", "use zero.stage=1 or 2", ranks=2),
    case("nothing to spread", "parallel: {expert: 2}", "a.yml:2: parallel.expert = 2", "there are no experts to spread", ranks=2),
    case("unknown option of the router", _MOE + "router: {topk: 2}}}", "a.yml:2: model.moe.router.topk"),
]

WARNED_MOE = [
    case("experts that choose", _MOE + "router: {select: expert_choice}}}", "a.yml:2: model.moe.router.select",
         "the model is not causal"),
    case("gate of no shared expert", _MOE + "shared_gate: true}}", "there is no shared expert to gate"),
    case("rate of no correction", _MOE + "router: {correction_rate: 0.01}}}", "model.moe.router.correction_rate = 0.01",
         "nothing is corrected"),
]

MOE += [
    case("map without a source", "checkpoint: {initialize_map: {layers.*.moe.router.weight: new}}",
         "checkpoint.initialize_map", "there is none", "give checkpoint.initialize_from"),
    case("stars that do not match",
         "checkpoint: {initialize_from: ., initialize_map: {layers.*.moe.experts.down.weight: layers.0.mlp.down.weight}}",
         "the same word on both sides"),
]
