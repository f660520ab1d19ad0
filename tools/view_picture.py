"""The picture of /view in the documentation: `python -m tools.view_picture [FILE]` (by default docs/view.png).

Starts a server of models/recall-micro, sends it the workload of agents, and takes a picture in headless Chromium
while it is under way.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from deltaserve.commands.chat.own_server import SERVE, own_server
from deltaserve.launch.compose import free_port
from tools.browser import browser
from tools.clients.with_chromium import find_chromium

ROOT = Path(__file__).resolve().parent.parent
_WARM_S = 3.0
_SHOWN_S = 9.0
_WIDTH, _HEIGHT = 1150, 1300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.view_picture", description="Take a picture of /view.")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "docs" / "view.png", help="where it goes")
    arguments = parser.parse_args()
    chromium, port = find_chromium(), free_port()
    if chromium is None:
        print("Chromium is not installed: apt-get install chromium-headless-shell", file=sys.stderr)
        return 1
    url, model = f"http://127.0.0.1:{port}", str(ROOT / "models" / "recall-micro")
    flags = ("--decode", "2", "--conditional-prefill", "off")
    with own_server(SERVE, ("serve", model, "--port", str(port), *flags), lambda line: None):
        bench = [sys.executable, "-m", "deltaserve", "bench", "--base-url", url, "--workload", "agents"]
        load = subprocess.Popen([*bench, "--max-concurrency", "12"], stdout=subprocess.DEVNULL)
        try:
            time.sleep(_WARM_S)
            with browser(chromium) as page:
                page.open(f"{url}/view")
                page.picture(_WIDTH, _HEIGHT)  # it is drawn for a window of that size from now on
                time.sleep(_SHOWN_S)
                arguments.file.write_bytes(page.picture(_WIDTH, _HEIGHT))
        finally:
            load.terminate()
            load.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
