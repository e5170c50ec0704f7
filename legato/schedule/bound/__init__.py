"""Lower bounds on the iteration time, and the arguments that prove them."""
