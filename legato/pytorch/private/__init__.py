"""Every use of torch's private interfaces in legato, for torch 2.11 to 2.15.

No other folder names an attribute or a module of torch that begins with an underscore, so only these files must be
checked against a new version of torch. Each definition says what it is for, and what could replace the private name.
"""
