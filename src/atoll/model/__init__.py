"""The words of the REST surface: what is asked and what is answered, field by field, with every range checked here.

Requests refuse unknown fields. `decode` is the only way in: it turns whatever is wrong with a request into
InvalidArgument. Answers leave out nothing, so that clients can rely on each field. Import from here, not from the parts.
"""

from atoll.model.coding import *  # noqa: F403
from atoll.model.commands import *  # noqa: F403
from atoll.model.fields import *  # noqa: F403
from atoll.model.files import *  # noqa: F403
from atoll.model.interpreter import *  # noqa: F403
from atoll.model.keys import *  # noqa: F403
from atoll.model.network import *  # noqa: F403
from atoll.model.sandboxes import *  # noqa: F403
from atoll.model.shells import *  # noqa: F403
from atoll.model.workspaces import *  # noqa: F403
