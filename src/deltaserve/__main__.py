"""`python -m deltaserve ...` is `deltaserve ...`."""

import sys

from deltaserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
