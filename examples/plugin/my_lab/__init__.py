"""A package outside of deepy that adds to it. `EXTENSION` lists its parts by role and name. It imports none."""

EXTENSION = {
    "kind": {"retention": "my_lab.retention.options:KIND"},
    "optimizer": {"qhadam": "my_lab.qhadam:QHAdam"},
    "schedule": {"multi_step": "my_lab.multi_step:multi_step"},
    "objective": {"focal": "my_lab.focal:Focal", "smoothing": "my_lab.smoothing.options:OBJECTIVE"},
    "source": {"recall": "my_lab.recall:Recall"},
    "feature": {"worst_label": "my_lab.worst_label.options:FEATURE"},
    "hook": {"weights": "my_lab.weights:Weights"},
    "metric": {"table": "my_lab.table:Table"},
    "architecture": {"ministral": "my_lab.ministral:MINISTRAL"},
    "runner": {"nice": "my_lab.nice:RUNNER"},
}
