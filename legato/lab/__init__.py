"""The lab: what reproduces the papers and tries legato on one machine. Training, planning and simulating do without it.

`papers` compares the papers' tables and figures with legato's (`legato reproduce`); `hypothetical` makes the models
that one of the papers invents. `testbed` emulates hosts and shaped links on one machine (`legato rehearse`), and
measures plans on any cluster (`legato verify`). `servers` trains with parameter servers (`legato.parameter_servers`).
`demo` shows all of legato in one command. `send_trace` reads and writes the traces of the Network Operator Edition.

The lab imports the rest of legato, and the rest only names the lab: in the verbs of `legato.commands`, in the public
names of `legato`, and in the trace formats of `legato.ingest`.
"""
