"""What every kernel of `generate` promises, on the vLLM kernel."""

from tests.kit.generate_suite import *  # noqa: F403
from tests.kit.joined_rows import *  # noqa: F403
