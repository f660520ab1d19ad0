"""A supervisor of what the JSON file argv[1] lists. Each notice is one JSON line: [type, fields]."""

import dataclasses
import json
import sys
from pathlib import Path

from deltaserve.launch.restarts import RestartPolicy
from deltaserve.launch.supervisor import Supervisor, SupervisorOptions
from deltaserve.process.children.child import ChildSpec, Kind
from deltaserve.process.children.child_events import ChildEvent


def show(event: ChildEvent) -> None:
    print(json.dumps([type(event).__name__, dataclasses.asdict(event)]), flush=True)


def main(path: Path) -> int:
    asked = json.loads(path.read_text())
    children = [
        ChildSpec(
            c["name"],
            tuple(c["argv"]),
            Kind[c["kind"]],
            c.get("env", {}),
            group=c.get("group"),
            may_be_forked=c.get("may_be_forked", False),
        )
        for c in asked["children"]
    ]
    preload = ChildSpec("preload", tuple(asked["preload"]), Kind.PREFILL) if asked.get("preload") else None
    restarts = RestartPolicy(**asked.get("restarts", {}))
    options = SupervisorOptions(
        log_dir=asked.get("log_dir", path.parent), restarts=restarts, **asked.get("options", {})
    )
    return Supervisor(children, options, show, preload).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
