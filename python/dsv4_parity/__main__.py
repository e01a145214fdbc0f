"""The command `parity`."""

import sys

from dsv4_parity import _native


def main():
    """Runs `parity` with the arguments of this process, and ends it."""
    sys.exit(_native.main(["parity", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
