"""MLCommons Chakra execution traces.

`importer` turns a graph of nodes into a workload, `export` writes a plan as such
a graph; `file` reads and frames the messages of a file, `schema` defines them.
"""
