"""`config show`: every setting can be read back, in the words of config.toml."""

import tomllib
from pathlib import Path

from .conftest import Cli


def test_config_show_is_a_whole_config(fresh: Cli) -> None:
    """What was set, and every default; the text is TOML that says the same as the JSON."""
    Path(fresh.home, "config.toml").write_text('[limits]\npids = 77\n[sandboxes]\nenv = {GREETING = "a \\"b\\""}\n')
    told = fresh.ok("config", "show", "--json")
    assert told["limits"]["pids"] == 77 and told["limits"]["memory_mb"] == 512
    assert told["sandboxes"]["env"] == {"GREETING": 'a "b"'} and len(told["sandboxes"]["hosts"]) == 5
    done = fresh("config", "show")
    assert done.code == 0 and tomllib.loads(done.text) == told
