"""The launch section, before anything else can be checked.

The number of ranks follows from the hosts, and the hosts from this section. The rest of the configuration is then
resolved for that number."""

from collections.abc import Sequence

from pydantic import ValidationError

from ... import config as configuration
from ...config.registry import RUNNER, Registry, registry_of
from ...config.sections.layout import LaunchSection
from ...config.source.extensions import extensions_of
from ...config.source.files import gather, normalise, translate_flat
from ...config.source.layers import merge

AUTO = "auto"


def launch_section(files: Sequence[str], overrides: Sequence[str]) -> LaunchSection:
    """The `launch` keys of some files and overrides.

    Raises:
        ConfigError: these keys are wrong. The error has every mistake of the whole configuration.
    """
    sources, _ = translate_flat(gather(files, overrides))
    merged, _ = merge([normalise(source) for source in sources])
    try:
        return LaunchSection.model_validate(merged.values.get("launch", {}))
    except ValidationError:
        return configuration.load(files, overrides).config.launch


def registry_for(files: Sequence[str], overrides: Sequence[str]) -> Registry:
    """The registry with the extensions of these files and overrides.

    Raises:
        ConfigError: one cannot be used, or the runner is none. The error has every mistake of the configuration.
    """
    sources, _ = translate_flat(gather(files, overrides))
    registry = registry_of(extensions_of(sources))
    runner = launch_section(files, overrides).runner
    if runner != AUTO and runner not in registry.names(RUNNER):
        configuration.load(files, overrides)
    return registry
