"""A process that exports a page of GPU memory, maps it and copies within it, as two workers do: exit code 0, or a line
on stderr.
"""

import os
import sys

import numpy as np

from deltaserve.core.errors import DeltaserveError
from deltaserve.transports.cuda_driver import CudaDriver
from deltaserve.transports.local.cuda_access import CudaAccess

_PAGE_BYTES = 1 << 21


def copy_page() -> None:
    """Raises CudaError or TransportError."""
    access = CudaAccess("cuda:0")
    page, file = CudaDriver(0).allocate(_PAGE_BYTES)
    mapped = access.map(file, _PAGE_BYTES)
    half = _PAGE_BYTES // 2
    access.copy(*np.array([[page.address + half], [mapped.address], [half]], np.uint64))
    mapped.close()
    page.close()
    os.close(file)


if __name__ == "__main__":
    try:
        copy_page()
    except DeltaserveError as problem:
        print(" ".join(str(problem).split()), file=sys.stderr, flush=True)
        sys.exit(1)
