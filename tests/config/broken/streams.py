"""Streams of texts that no run can be trained on."""

from __future__ import annotations

from tests.config.broken.case import case

STREAMS = [
    case(
        "stream that is not there",
        "data: {synthetic: none, train: {stream: nowhere}, order: window}\n"
        "tokenizer: {type: bytes}\nmodel: {vocab_size: 257}",
        "a.yml:2: data.train.0.stream = 'nowhere'",
        "must exist: there is no nowhere",
    ),
    case(
        "stream with files of no known ending only",
        "data: {synthetic: none, train: {stream: whole.bin}, order: window}\n"
        "tokenizer: {type: bytes}\nmodel: {vocab_size: 257}",
        "there are only whole.bin",
        ".jsonl, .ndjson, .json, .parquet",
    ),
    case(
        "stream of a protocol without a package",
        "data: {synthetic: none, train: {stream: 'nothing://a/b'}, order: window}\n"
        "tokenizer: {type: bytes}\nmodel: {vocab_size: 257}",
        "a.yml:2: data.train.0.stream = 'nothing://a/b'",
        "the package for the URL's protocol must be installed",
    ),
    case(
        "stream whose URL has a password",
        "data: {synthetic: none, train: {stream: 'http://me:hidden@127.0.0.1:1/a?b'}, order: window}\n"
        "tokenizer: {type: bytes}\nmodel: {vocab_size: 257}",
        "a.yml:2: data.train.0.stream\n",
        "must not have a password, key or signature",
    ),
    case(
        "stream with all that needs the number of its tokens, and without a tokenizer",
        "data:\n  synthetic: none\n  train: [{stream: a.yml, labels: whole}, {path: whole, shards: x}]\n"
        "  weighting: tokens\n  validation: {stream: a.yml}\nevaluation: {breakdown: [frequency]}",
        "data.order = 'pythia'",
        "must be window with a stream, whose documents are counted while the run trains",
        "data.weighting = 'tokens'",
        "must be given with a stream",
        "must not have frequency with a stream",
        "data.train.0.labels = 'whole'",
        "must not go with stream",
        "data.train.1.shards = 'x'",
        "must go with stream",
        "data.validation.validation.0.stream = 'a.yml'",
        "an evaluation reads the same samples each time",
        "must have a tokenizer for its texts",
        problems=10,
    ),
    case(
        "epochs of a stream",
        "data: {synthetic: none, train: {stream: a.yml}, order: window}\ntraining: {steps: null, epochs: 2}\n"
        "tokenizer: {type: bytes}\nmodel: {vocab_size: 257}",
        "a.yml:3: training.epochs = 2",
        "must be absent with a stream, whose documents are counted while the run trains",
        "must be counted from the token files",
        problems=3,
    ),
    case(
        "stream whose token file would be one of its texts, and is evaluated",
        "data:\n  synthetic: none\n  train: {stream: ., path: ./in/it}\n  order: window\n  validation: in/it\n"
        "tokenizer: {type: bytes}\nmodel: {vocab_size: 257}",
        "must not be inside .",
        "a.yml:6: data.validation.validation.0.path = 'in/it'",
        "must not be the token file of a stream that the run trains on",
        problems=3,
    ),
]
