"""An image built from Debian packages, and the same tree pulled from a registry with TLS and a login: in both, `pip install`
from the real index and the import work, by the default list of hosts."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from lab.images import RegistryServer, build_image
from lab.sandboxes import NO_SPARES, PATIENCE, RUNTIMES, Lab, reachable

from atoll.egress import default_hosts

NAME = "with-pip"
INSTALL = "python3 -m pip install --quiet --no-cache-dir --disable-pip-version-check six && python3 -c 'import six; print(six.__name__)'"


@pytest.fixture(scope="module")
def stocked(registry: RegistryServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, dict[str, str]]]:
    """A daemon that has both images, got through the command line; their names by where they are from."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("needs root and mmdebstrap")
    login = tmp_path_factory.mktemp("login")
    registry.docker_config(login)
    lab = Lab(f"{NO_SPARES}[images]\nca_file = {json.dumps(str(registry.ca))}\n")
    lab.env["DOCKER_CONFIG"] = str(login)
    try:
        _image(lab, "build", NAME, "--debian", "python3,python3-pip")
        kept = json.loads(lab.cli("image", "inspect", NAME).stdout)
        tree = subprocess.run(
            ["tar", "--numeric-owner", "-C", kept["layers"][0], "-c", "."], capture_output=True, check=True
        )
        image = build_image(tree.stdout, compress=lambda raw: gzip.compress(raw, 1, mtime=0))
        reference = registry.push("private/with-pip", "1", image)
        _image(lab, "pull", reference)
        yield lab, {"debian": NAME, "registry": reference}
    finally:
        lab.close()


def _image(lab: Lab, *words: str) -> None:
    """Building one takes longer than any other command."""
    argv = [sys.executable, "-m", "atoll", "image", *words]
    done = subprocess.run(argv, env=lab.env, capture_output=True, text=True, timeout=8 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not reachable(default_hosts()[0]), reason="the index cannot be reached from this machine")
@pytest.mark.parametrize("source", ["debian", "registry"])
@pytest.mark.parametrize("isolation", RUNTIMES)
def test_pip_installs_and_the_module_is_there(stocked: tuple[Lab, dict[str, str]], source: str, isolation: str) -> None:
    """Through the broker, with nothing configured; what is in one sandbox's layer is not in the next one's."""
    lab, names = stocked
    if why := lab.works(isolation):
        pytest.skip(f"{isolation}: {why}")
    options = {"runtime": isolation, "image": names[source], "network": True, "memory_mb": 768, "disk_mb": 256}
    with lab.sandbox(**options) as made:
        done = made.exec(INSTALL, timeout=2 * PATIENCE)
        assert (done.exit_code, done.stdout) == (0, "six\n"), done
    with lab.sandbox(**options) as fresh:
        assert fresh.exec("python3 -c 'import six'").exit_code == 1
