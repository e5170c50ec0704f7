"""The command line: one file per verb. `options` has options that verbs share, `output` prints text."""
