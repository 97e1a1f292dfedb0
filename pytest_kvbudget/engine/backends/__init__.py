"""One module per engine family; others come through the entry-point group ``pytest_kvbudget.backends``."""
