"""The network: hosts and their links (`network.py`), the switches above them (`switches.py`), temporary slowdowns
(`disturbances.py`), and the ways to send (`topology.py`; `alone.py`, if one worker stands for all).
"""
