"""The verbs of atoll. Adapters translate to and from these and hold no logic of their own."""

from pathlib import Path

from atoll.backends.contract import Backend
from atoll.config import Config
from atoll.core.commands import Commands
from atoll.core.exposures import Exposures
from atoll.core.files import Files
from atoll.core.history import History
from atoll.core.hosts import Hosts
from atoll.core.images import Images
from atoll.core.keys import Keys
from atoll.core.manifest import Manifests
from atoll.core.network import Loopback, Network
from atoll.core.once import Once
from atoll.core.ports import Ports
from atoll.core.reaper import Reaper
from atoll.core.recovery import reconcile
from atoll.core.sandboxes import Sandboxes
from atoll.core.snapshots import Snapshots
from atoll.core.store import Store
from atoll.core.subagents import SubAgents


class Core:
    """Everything a daemon can do, on one backend and one state directory."""

    def __init__(
        self, home: Path, backend: Backend, images: Images, config: Config, network: Network | None = None
    ) -> None:
        self.home = home
        self.config = config
        self.backend = backend
        self.images = images
        self.network: Network = network or Loopback()
        self.store = Store(home / "atoll.db")
        self.keys = Keys(home / "atoll.db")
        self.history = History(self.store, home / "transcripts")
        self.sandboxes = Sandboxes(self.store, backend, images, self.network, self.history, config, home)
        self.commands = Commands(self.sandboxes, self.store, self.history, home / "runs")
        self.files = Files(self.sandboxes)
        self.ports = Ports(self.sandboxes)
        self.hosts = Hosts(self.sandboxes, self.store, self.history, self.network)
        self.exposures = Exposures(self.sandboxes, self.store, self.history)
        self.subagents = SubAgents(self.sandboxes)
        self.snapshots = Snapshots(self.sandboxes, self.history, home)
        self.reaper = Reaper(self.sandboxes)
        self.once = Once(self)
        self.manifests = Manifests(self)

    async def start(self) -> None:
        """Bring the records and the machine into agreement, then watch the clock. Nothing is served before."""
        await self.network.start()
        await self.backend.start()
        await reconcile(self.sandboxes, self.commands)
        await self.subagents.end_orphans()
        await self.reaper.reap()
        self.reaper.start()

    async def close(self) -> None:
        """Leave. Sandboxes and everything in them go on."""
        await self.reaper.close()
        await self.sandboxes.close()
        connected = any(row["state"] in ("running", "paused") for row in self.store.living())
        await self.network.close(keep=connected)
        await self.backend.close()
        self.history.close()
        self.keys.close()
        self.store.close()
