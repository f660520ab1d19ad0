"""UCX reads its environment when the first agent is made, so it is set before any test here is imported."""

import os

from deltaserve.transports.nixl.options import environment
from tests.transports.puppets import NIXL_OPTIONS

os.environ.update(environment(NIXL_OPTIONS))
