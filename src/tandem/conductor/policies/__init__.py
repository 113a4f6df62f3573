"""How instances are chosen: one module a policy, behind the interface ``Policy``."""
