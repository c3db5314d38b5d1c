"""Data that cannot be read as asked."""

from tests.config.broken.case import case

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
        "deepy data tokenize",
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
        "must have a tokenizer with its special tokens",
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
        "synthetic samples have no documents",
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
        "must be absent here: an evaluation weighs all labels alike",
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
