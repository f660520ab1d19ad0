"""The front stays small: it starts without the machine-learning stack."""

import subprocess
import sys

CODE = "import sys, deltaserve.server.listening; print(*sorted({'torch', 'transformers', 'nixl'} & sys.modules.keys()))"


def test_the_front_loads_no_model_library() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""
