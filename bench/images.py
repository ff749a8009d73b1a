"""Pulling an image from a registry on loopback, against curl of the very same blobs."""

import subprocess

from bench import registry
from bench.lab import ATOLL, Lab
from bench.measure import Contender, absent
from bench.programs import Unavailable, find, run

SIZE = registry.LAYERS * registry.LAYER_BYTES


def pull(lab: Lab) -> list[Contender]:
    try:
        curl, served = find("curl"), registry.serve(lab.work, lab.row)
    except Unavailable as error:
        return [absent("curl of the blobs", str(error)), absent("atoll", str(error))]
    base, image = f"https://{served.address}/v2/bench/blobs", f"{served.address}/bench:1"
    urls = [word for blob in served.blobs for word in ("-o", "/dev/null", f"{base}/{blob}")]

    def forget() -> None:
        subprocess.run([*ATOLL, "image", "rm", image], env=lab.env, capture_output=True)

    fetch = [curl, "--silent", "--show-error", "--fail", "--cacert", str(lab.work / registry.CA), *urls]
    return [
        Contender("curl of the blobs", lambda: run(fetch)),
        Contender("atoll", lambda: run([*ATOLL, "image", "pull", image], env=lab.env), after=forget),
    ]
