"""Import and export of MLCommons Chakra execution traces.

`importer` turns a graph of nodes into a workload, and `export` writes a plan as a graph. `file` reads and writes the
messages of a file, and `schema` defines them.
"""
