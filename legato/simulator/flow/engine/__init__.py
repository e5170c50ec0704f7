"""The engine, which runs services on links.

Simulations add services (`services.py`) to a graph (`graph.py`). Links serve services one after another (first come,
first served, or by priority; `loop.py`), or all at once at max-min fair rates (`fair.py`).
"""
