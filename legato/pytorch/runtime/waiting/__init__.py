"""Parameters that wait for their updates: where their gradients are, what updates them, and who reads them."""
