"""``python -m pytest_kvbudget.mock serve MODEL ...``."""

import sys

from pytest_kvbudget.mock.server import main

main(sys.argv[1:])
