"""Opens transports, each with one region and in a process of its own, which is forked: torch is imported once.

stdin: a JSON list of {fields, device, memory, path, environ}: fields of the spec, where the region is, `private` or
`shared` memory, a folder whose packages are found before all others, and variables. stdout: a JSON list of what came of
each, `opened` or the error.
"""

import json
import mmap
import os
import sys
from ctypes import addressof, c_char
from typing import Any

from deltaserve.core.extents import Region
from deltaserve.core.ids import Boot, PeerName, RegionId, Role
from deltaserve.core.layout.dtype import DType
from deltaserve.core.transport import TransportError
from deltaserve.process.worker.transports import open_transport
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.transports.local.memory_access import sealed_file

NUM_BYTES = 4096


def opened(asked: dict[str, Any]) -> str:
    """`opened`, or what the user is told."""
    spec = WorkerSpec(
        name="decode-0",
        role=Role.DECODE,
        model_path="",
        device="cpu",
        dtype=DType.FLOAT32,
        kv_dtype=DType.FLOAT32,
        page_size=16,
        num_pages=(4,),
        max_running_requests=1,
        max_context_len=64,
        secret_path="",
        **asked["fields"],
    )
    file = sealed_file(NUM_BYTES, "pages") if asked["memory"] == "shared" else None
    memory = mmap.mmap(-1 if file is None else file, NUM_BYTES)
    region = Region(RegionId(0), addressof(c_char.from_buffer(memory)), NUM_BYTES, asked["device"], file)
    try:
        open_transport(spec, PeerName("decode-0.0"), Boot(1), [region]).close()
    except TransportError as error:
        return str(error)
    return "opened"


def in_a_process(asked: dict[str, Any]) -> str:
    ours, theirs = os.pipe()
    if not os.fork():
        sys.path.insert(0, asked["path"])
        os.environ.update(asked["environ"], PYTHONPATH=os.pathsep.join(sys.path))  # for processes of the transport
        os.write(theirs, opened(asked).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answer:
        said = answer.read().decode()
    os.wait()
    return said


if __name__ == "__main__":
    json.dump([in_a_process(asked) for asked in json.load(sys.stdin)], sys.stdout)
