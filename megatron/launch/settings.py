"""The launch section alone, before anything else of the configuration can be checked.

How many ranks a run has follows from its hosts, and the hosts from this section; the rest of the configuration is
then resolved for that number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from .. import config as configuration
from ..config.files import gather
from ..config.flat import translate_flat
from ..config.layers import merge
from ..config.sections.layout import LaunchSection
from ..config.shorthand import normalise


def launch_section(files: Sequence[str], overrides: Sequence[str]) -> LaunchSection:
    """The `launch` keys of some files and overrides.

    Raises:
        ConfigError: these keys are wrong; the error tells of every mistake in the whole configuration.
    """
    sources, _ = translate_flat(gather(files, overrides))
    merged, _ = merge([normalise(source) for source in sources])
    try:
        return LaunchSection.model_validate(merged.values.get("launch", {}))
    except ValidationError:
        return configuration.load(files, overrides).config.launch
