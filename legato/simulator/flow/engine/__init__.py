"""The engine: services (`services.py`), which simulations add to a graph (`graph.py`), run on links that serve them in
turn, first come, first served or by priority (`loop.py`), or all at once at max-min fair rates (`fair.py`)."""
