"""What every kernel of `generate` promises, on the vLLM kernel."""

from tests.kit.generate_suite import *  # noqa: F403
