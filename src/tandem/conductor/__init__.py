"""The conductor: it decides which instances serve a request, and if the request is accepted.

Pure policies over columns (numpy arrays, one entry per instance) that events of the instances keep
current. Time is an argument. The server and the simulator run the same classes;
``docs/design/engine/conductor.md`` says how they are called.
"""
