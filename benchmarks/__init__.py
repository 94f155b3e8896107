"""Programs that measure this package against its peers; each prints a table, writes JSON and draws a plot."""
