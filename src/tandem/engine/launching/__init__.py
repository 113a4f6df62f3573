"""Launchers, which own instances that several servers use: their service, rosters and clients."""
