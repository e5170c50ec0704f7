"""Lower bounds on the iteration time, their arguments, and their exact check."""
