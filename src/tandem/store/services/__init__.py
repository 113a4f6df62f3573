"""The processes of a store: master, host and client, on ``tandem.rpc`` and ``tandem.transfer``."""
