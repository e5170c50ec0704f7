"""Parameters that wait for their updates: where their gradients lie, what updates them, and who reads them."""
