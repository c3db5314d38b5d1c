"""Broken configurations by concern: what stands in a.yml, and what the message must say."""

from tests.config.broken.case import BASE, Case
from tests.config.broken.keys import KEYS, RANGES, TYPES, YAML
from tests.config.broken.model import DEEPSPEED, LAYOUT, MODEL
from tests.config.broken.recipe import DATA, LAUNCH, OUTPUT, RECIPE, SCHEDULE
from tests.config.broken.warned import WARNED

BROKEN = [*KEYS, *TYPES, *RANGES, *YAML, *MODEL, *LAYOUT, *RECIPE, *SCHEDULE, *DATA, *OUTPUT, *LAUNCH, *DEEPSPEED]

__all__ = ["BASE", "BROKEN", "WARNED", "Case"]
