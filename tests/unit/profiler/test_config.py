import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.profiler.config import ProfilerConfig


def test_defaults_are_those_of_the_released_profiler() -> None:
    config = load(ProfilerConfig, ["--config", "{}"], {})
    assert config.output_dir == "profiling_results"
    assert config.deployment_timeout == 3600
    assert (config.prefill_interpolation_granularity, config.decode_interpolation_granularity) == (16, 6)
    assert not config.dry_run


@pytest.mark.parametrize("argv", [[], ["--config", "{}", "--deployment-timeout", "0"]])
def test_wrong_command_lines_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        load(ProfilerConfig, argv, {})
