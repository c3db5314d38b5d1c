"""Stages of batch size that cannot be."""

from tests.config.broken.case import case


def stages(text: str) -> str:
    return "training: {batch_schedule: [" + text + "]}"


BATCHES = [
    case(
        "a batch that ranks cannot share",
        stages("{until: 50, global_batch_size: 10}"),
        "a.yml:2: training.batch_schedule.0.global_batch_size = 10",
        "must be a multiple of micro_batch_size * data parallel size, here 2 * 2 = 4",
        "fix:  use 8 or 12",
    ),
    case(
        "batches out of order",
        stages("{until: 50, global_batch_size: 4}, {until_tokens: 6400, global_batch_size: 8}"),
        "training.batch_schedule.1.until_tokens = 6400",
        "must be above the end of the stage before, step 50",
    ),
    case(
        "a batch with two ends",
        stages("{until: 50, until_tokens: 100, global_batch_size: 4}"),
        "training.batch_schedule.0",
        "must have an end, given once: until (steps) or until_tokens",
    ),
    case(
        "a batch without an end",
        stages("{global_batch_size: 4}"),
        "training.batch_schedule.0",
        "must have an end, given once",
    ),
    case(
        "parts of batches of several sizes",
        stages("{until: 50, global_batch_size: 4}") + "\ndata: {epoch_parts: 2}",
        "data.epoch_parts = 2",
        "must be 1 with batches of several sizes",
    ),
    case(
        "noise of a batch of one sample",
        "training: {micro_batch_size: 1, batch_schedule: [{until: 50, global_batch_size: 1}]}\n"
        "logging: {noise_scale: 10}",
        "logging.noise_scale",
        "must have at least two samples in a batch",
        ranks=1,
    ),
    case(
        "batches that do not interleave",
        stages("{until: 50, global_batch_size: 10}") + "\nparallel: {pipeline: 2, schedule: zb_h1}",
        "a batch is n * 4",
        "use 8 or 12",
        problems=1,
    ),
    case(
        "batches of several sizes with a file's schedule",
        stages("{until: 50, global_batch_size: 8}") + "\nparallel: {pipeline: 2, schedule: no.csv}",
        "must not be a file",
        problems=2,
    ),
]
WARNED_BATCHES = [
    case(
        "a batch beyond the last step",
        stages("{until_tokens: 1000000, global_batch_size: 4}"),
        "training.batch_schedule.0.until_tokens = 1000000",
        "must end before training.steps, here at step 7,813",
    )
]
