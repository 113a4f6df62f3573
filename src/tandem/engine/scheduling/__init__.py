"""Which tokens the next step computes, in which blocks: pure, but for the loads."""
