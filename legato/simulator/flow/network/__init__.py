"""The network of a flow simulation.

`network.py` describes hosts and their links, `switches.py` the switches above the hosts, and `disturbances.py`
temporary slowdowns. `topology.py` has the functions that send over these links.
"""
