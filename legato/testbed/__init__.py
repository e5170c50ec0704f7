"""Floor 3: hosts and shaped links on one machine, for plans to be tried on."""
