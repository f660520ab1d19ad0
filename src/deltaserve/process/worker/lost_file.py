"""A worker that starts again where the folder of its file is gone, full or read-only serves without the file.

At its first start a wrong `--cache-dir` is refused: whoever gave it is there to hear of it. Later the file is worth no
more than the hits that it would bring. Rank 0 asks for the space of all ranks before it starts the others, since all of
them have a file or none has.
"""

import logging
from pathlib import Path

import msgspec

from deltaserve.core.errors import ConfigError, one_line
from deltaserve.core.files.unnamed_file import open_unnamed
from deltaserve.process.worker.worker_spec import WorkerSpec

_log = logging.getLogger(__name__)


def without_lost_file(spec: WorkerSpec) -> WorkerSpec:
    """What the worker can have of the spec it had when it served last: slots of a file only where there is one."""
    if spec.cache_dir is None or not spec.cache_slots:
        return spec
    try:
        open_unnamed(Path(spec.cache_dir), spec.cache_bytes, "--cache-dir").close()
    except ConfigError as error:
        _log.warning("%s; it serves without a file under its cache until it starts again", one_line(error))
        return msgspec.structs.replace(spec, cache_slots=())
    return spec
