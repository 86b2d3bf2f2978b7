"""Which numbers are usual: runs recorded on machines of known classes (`records`), and where a number stands beside
them (`ranges`)."""
