"""The command line, `agl …`: turns arguments into calls of the rooms below, and shows the
results."""
