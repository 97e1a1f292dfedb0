"""``python -m pytest_kvbudget.mock serve MODEL ...``, or ``probability ...``."""

import sys

if sys.argv[1:2] == ["probability"]:
    from pytest_kvbudget.mock.probability import main as probability

    sys.exit(probability(sys.argv[2:]))

from pytest_kvbudget.mock.server import main

main(sys.argv[1:])
