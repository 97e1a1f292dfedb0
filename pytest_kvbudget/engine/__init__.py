"""Starting, watching and ending an engine: backends, launchers, keeper, client."""
