"""An instance as a process: its program, its supervision, a session with it."""
