"""The verbs of atoll. Adapters translate to and from these and hold no logic of their own."""

from contextlib import suppress
from pathlib import Path

from atoll.accounts import Accounts
from atoll.backends.contract import Backend
from atoll.config import Config
from atoll.core.access.approval_rules import Gate
from atoll.core.access.approvals import Approvals
from atoll.core.access.audit import Audit
from atoll.core.access.audited_verbs import Auditing, Part
from atoll.core.access.credentials import Doorkeeper
from atoll.core.access.held_connections import Connections
from atoll.core.access.key_confirmation import Granting
from atoll.core.access.key_verbs import KeyVerbs
from atoll.core.access.keys import Keys
from atoll.core.access.secrets import Secrets, Vault
from atoll.core.builds.templates import Templates
from atoll.core.builds.verbs import Builds
from atoll.core.commands.history import History
from atoll.core.commands.history_verbs import Past
from atoll.core.commands.leftovers import Leftovers
from atoll.core.commands.shells import Shells
from atoll.core.commands.verbs import Commands
from atoll.core.files.exposures import Exposures
from atoll.core.files.ports import Ports
from atoll.core.files.verbs import Files
from atoll.core.interpreter.serving import Interpreters
from atoll.core.interpreter.verbs import Interpreter
from atoll.core.policy.hosts import Hosts
from atoll.core.policy.image_verbs import ImageVerbs
from atoll.core.policy.images import Images
from atoll.core.policy.network import Network
from atoll.core.sandboxes.idle_freeze import Doze
from atoll.core.sandboxes.memory import Checkpoints
from atoll.core.sandboxes.metrics import Metrics
from atoll.core.sandboxes.notes import Notes
from atoll.core.sandboxes.oneshot import Once
from atoll.core.sandboxes.places import Places
from atoll.core.sandboxes.reaper import Reaper
from atoll.core.sandboxes.recovery import reconcile
from atoll.core.sandboxes.sessions import Sessions
from atoll.core.sandboxes.subagents import SubAgents
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.choice import chosen_database
from atoll.core.store.records import Store
from atoll.core.volumes.verbs import Volumes
from atoll.core.workers import Workers
from atoll.core.workspaces.manifest import Manifests
from atoll.core.workspaces.snapshots import Snapshots
from atoll.errors import AtollError

HOST = "host"


class Core:
    """Everything a daemon can do, on one backend and one state directory."""

    def __init__(self, home: Path, backend: Backend, images: Images, config: Config) -> None:
        self.home = home
        self.config = config
        self.accounts = Accounts(config.accounts.caps())
        self.workers = Workers(self.accounts)
        self.backend = backend
        self.images = images
        self.network = Network(backend, config.sandboxes.hosts, config.egress)
        open_database = chosen_database(home, config.storage.database_file)
        self.store = Store(open_database("records"))
        self.keys = Keys(open_database("keys"))
        self.keeper = Doorkeeper(self.keys)
        self.granting = Granting(self.store, freely=config.security.approve_keys_without_terminal)
        self.history = History(self.store, home / "transcripts")
        self.secrets = Vault(Secrets(home))
        self.sandboxes = Sandboxes(self.store, backend, images, self.network, self.history, config, home, self.secrets)
        images.room = self.sandboxes.space.left
        self.approvals = Approvals(self.sandboxes, self.store, self.history, self.keys)
        gate = Gate(self.approvals)
        self.commands = Commands(self.sandboxes, self.store, self.history, home / "runs", self.secrets, gate)
        self.past = Past(self.sandboxes, self.history)
        self.leftovers = Leftovers(self.sandboxes)
        self.shells = Shells(self.sandboxes, self.commands)
        self.files = Files(self.sandboxes, self.history, gate)
        self.ports = Ports(self.sandboxes)
        self.interpreters = Interpreters(self.sandboxes, self.ports, self.secrets, self.history)
        self.interpreter = Interpreter(self.sandboxes, self.ports, self.interpreters)
        self.hosts = Hosts(self.sandboxes, self.store, self.history, self.network)
        self.exposures = Exposures(self.sandboxes, self.store, self.history, self.keeper)
        self.connections = Connections(self.approvals, self.sandboxes, self.store, self.network)
        self.sandboxes.accounts = self.accounts
        self.subagents = SubAgents(self.sandboxes)
        self.manifests = Manifests(self)
        self.sessions = Sessions(self.sandboxes, self.manifests)
        self.snapshots = Snapshots(self.sandboxes, self.history, home, self.workers)
        self.checkpoints = Checkpoints(self.sandboxes, home, self.commands.starter.recover)
        self.audit = Audit(home / "audit", config.storage.audit_mb << 20)
        self.reaper = Reaper(self.sandboxes, self.audit.settle)
        self.doze = Doze(self.sandboxes.live.values, config.sandboxes.doze_after_s)
        self.notes = Notes(self.sandboxes, self.store)
        self.places = Places(self.store)
        self.metrics = Metrics(self.sandboxes)
        self.once = Once(self)
        self.keeper.watch.on_lost_key(self.approvals.withdraw_all)
        self.keeper.watch.on_lost_key(self.exposures.end_all)
        self.key_verbs = KeyVerbs(self.keys, self.granting, self.keeper.watch)
        self.builds = Builds(self, home)
        self.sandboxes.boxes.built = self.builds.digest_of
        self.templates = Templates(self, home)
        self.volumes = Volumes(self, home)
        self.image_verbs = ImageVerbs(images, self.store, self.builds.in_use)
        self.auditing = Auditing(self.audit, self.sandboxes)
        for part in vars(self).values():
            if isinstance(part, Part):
                part.auditing = self.auditing

    async def start(self) -> None:
        """Bring the records and the machine into agreement, then watch the clock. Nothing is served before."""
        if self.config.sandboxes.image == HOST:  # the first sandbox needs it, and looking at all of /usr takes a second
            self.sandboxes.tasks.spawn(self._look_ahead())
        self.connections.withdraw_left_over()
        self.approvals.withdraw_of_lost_keys(self.keeper)
        self.volumes.start()
        await self.backend.start(self.network)
        await reconcile(self.sandboxes, self.commands)
        await self.subagents.end_orphans()
        await self.checkpoints.recover()
        await self.builds.start()
        self.templates.start()
        await self.reaper.reap()
        self.reaper.start()
        self.doze.start()

    async def _look_ahead(self) -> None:
        with suppress(AtollError, OSError):  # whoever needs it is told what is wrong
            await self.images.choose(HOST)

    async def close(self) -> None:
        """Leave. Sandboxes and everything in them go on."""
        self.keeper.watch.close()
        await self.templates.close()
        await self.connections.close()
        await self.doze.close()
        await self.reaper.close()
        await self.sandboxes.close()
        await self.backend.close()
        self.workers.close()
        self.history.close()
        self.keys.close()
        self.store.close()
        self.audit.close()
