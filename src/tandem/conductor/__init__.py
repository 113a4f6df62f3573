"""The conductor: which instances serve a request, and whether it is accepted at all.

Pure policies over columns (numpy) that events keep current. Time is an argument. The server and the
simulator run these very classes; ``docs/design/engine/conductor.md`` says how they are called.
"""
