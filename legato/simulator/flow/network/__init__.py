"""What transfers travel on: the hosts and their links (`network.py`), the switches above them (`switches.py`), what is
slower for a while (`disturbances.py`), and the ways to send (`topology.py`; `alone.py`, if one worker stands for all).
"""
