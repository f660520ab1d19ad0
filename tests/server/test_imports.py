"""The front stays small: it starts without the machine-learning stack."""

import subprocess
import sys

from tests.patience import PATIENCE_S

CODE = "import sys, deltaserve.server.listening; print(*sorted({'torch', 'transformers', 'nixl'} & sys.modules.keys()))"


def test_the_front_loads_no_model_library() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == ""
