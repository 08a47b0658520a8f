"""What became of each claim, shown on the cluster's objects; and the finalizer that outlives the machine."""
