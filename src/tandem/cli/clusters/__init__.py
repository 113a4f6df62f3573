"""``tandem cluster``: the processes of a cluster, and changes of its instances while they serve."""
