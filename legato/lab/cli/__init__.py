"""The lab's verbs: one file per verb, like `legato.cli`."""
