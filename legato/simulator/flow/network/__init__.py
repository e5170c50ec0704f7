"""The network of a flow simulation.

The network consists of hosts and their links (`network.py`), the switches above them (`switches.py`), temporary
slowdowns (`disturbances.py`), and the ways to send (`topology.py`, or `alone.py` if only one of many identical workers
is simulated).
"""
